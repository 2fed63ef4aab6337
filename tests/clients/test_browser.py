"""The pages in a real browser."""

from __future__ import annotations

import shutil

import pytest

from tests.api.conftest import Api, Socket

from . import scripted
from .conftest import HERE, python_with, run

pytestmark = pytest.mark.browser


def test_pages_in_chromium(scripted_server, tmp_path):
    """Chat with streaming, reasoning, calls, stopping, settings; the live view; a phone; both
    schemes; contrast, labels; an API key. Nothing is fetched from elsewhere."""
    python = python_with("playwright")
    if shutil.which("chromium") is None:
        pytest.skip("needs chromium")
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    api = Api(**scripted.options(), api_keys=str(keys))
    keyed = Socket(api)
    try:
        run([python, str(HERE / "scripts" / "browser.py"), scripted_server.url, keyed.url, str(tmp_path)])
    finally:
        keyed.close()
        api.close()
    assert len(list(tmp_path.glob("*.png"))) >= 10

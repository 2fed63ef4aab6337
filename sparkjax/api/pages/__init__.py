"""The pages that the server shows in a browser.

Each is one file that fetches nothing from elsewhere. The pages themselves are open; what they show
comes from routes that ask for the API key.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

PAGES = {"/": "chat.html", "/docs": "docs.html"}
"""Path -> file."""


@functools.cache
def read(name: str) -> tuple[bytes, dict[str, str]]:
    """A page's bytes and headers. Its own scripts and styles run, by their hashes, and no others."""
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    policy = {
        "default-src": ["'none'"],
        "script-src": _hashes("script", text),
        "style-src": _hashes("style", text),
        "connect-src": ["'self'"],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "frame-ancestors": ["'none'"],
    }
    headers = {
        "content-type": "text/html; charset=utf-8",
        "cache-control": "no-cache",
        "content-security-policy": "; ".join(f"{k} {' '.join(v)}" for k, v in policy.items()),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return text.encode(), headers


def _hashes(tag: str, text: str) -> list[str]:
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
    digests = (hashlib.sha256(block.encode()).digest() for block in blocks)
    return [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests] or ["'none'"]


async def page(request: Request) -> Response:
    """The handler of every page."""
    content, headers = read(PAGES[request.url.path])
    return Response(content, headers=headers)

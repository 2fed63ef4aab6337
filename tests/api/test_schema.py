"""The OpenAPI description says what the parsers do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sparkjax.api import chat, completions
from sparkjax.api.schema import openapi

from . import toy

SERVED = toy.make_served()
DESCRIPTION = openapi(SERVED)
SCHEMAS = DESCRIPTION["components"]["schemas"]


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_references_lead_somewhere():
    for reference in references(DESCRIPTION):
        assert reference.removeprefix("#/components/schemas/") in SCHEMAS


def test_the_description_names_every_route_and_field(api):
    served = api.get("/openapi.json").json()
    assert served == openapi(api.served)
    assert api.get("/docs").status_code == 200
    own = {r.path.replace(":path", "") for r in api.app.routes} - {
        "/", "/docs", "/openapi.json",
    }  # fmt: skip
    assert own == set(DESCRIPTION["paths"])
    assert set(SCHEMAS["ChatRequest"]["properties"]) == chat.KNOWN
    assert set(SCHEMAS["CompletionRequest"]["properties"]) == completions.KNOWN


def test_its_examples_are_served(api):
    for path, name in (("chat/completions", "ChatRequest"), ("completions", "CompletionRequest")):
        assert api.post(f"/v1/{path}", SCHEMAS[name]["example"]).status_code == 200


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis")
def test_schemathesis_runs_clean(make_socket, tmp_path):
    """Generated requests, valid and not: nothing crashes, every answer is as described, and what
    the description forbids is refused.

    Left out: that every described request is accepted. Some limits depend on two fields (the
    prompt and max_tokens share the context; max_tokens and max_completion_tokens exclude each
    other), which the description cannot say. And the profiler, which would write wherever a
    generated path points.
    """
    server = make_socket()
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json",
         "--exclude-checks", "positive_data_acceptance", "--exclude-path", "/admin/profile",
         "--max-examples", "60", "--no-color"],
        cwd=tmp_path, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    server.api.engine.wait_idle()

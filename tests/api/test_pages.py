"""The pages' bytes and headers; tests/clients/test_browser.py opens them in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from . import fake_engine

FOLDER = Path(__file__).parents[2] / "sparkjax" / "api" / "pages"


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_fetch_nothing_from_elsewhere(api, path):
    response = api.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    text = response.text
    assert not re.search(r"(src|href)=.?(https?:)?//", text) and "import(" not in text
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text
    for tag in ("script", "style"):
        (block,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r'\s(on\w+|style)="', text)  # the policy would block them


def test_pages_are_open_and_what_they_show_is_not(make_api, tmp_path):
    file = tmp_path / "keys"
    file.write_text("right\n")
    api = make_api(api_keys=str(file))
    assert api.get("/").status_code == api.get("/docs").status_code == 200
    for path in ("/status", "/openapi.json"):
        assert api.get(path).status_code == 401
        assert api.get(path, headers={"Authorization": "Bearer right"}).status_code == 200


def test_status_counts_what_happened(make_api):
    api = make_api(script=fake_engine.speak("Hello"))
    before = api.get("/status").json()
    assert before["model"] == "toy" and before["state"] == "ready"
    assert before["requests"] == {
        "running": 0, "prefilling": 0, "waiting": 0, "slots": 4, "queue": 8, "finished": 0,
    }  # fmt: skip
    usage = api.chat("hi").json()["usage"]
    after = api.get("/status").json()
    assert after["requests"]["finished"] == 1
    assert after["tokens"]["generated"] == usage["completion_tokens"]
    assert after["tokens"]["prompt"] == usage["prompt_tokens"]
    assert after["first_token"]["count"] == 1 and after["first_token"]["seconds"] > 0
    assert after["time"] >= before["time"] and after["started"] == before["started"]
    assert after["kv"]["pages_total"] == fake_engine.LIMITS.pages
    assert [(each["rank"], each["state"]) for each in after["ranks"]] == [(0, "ready")]
    api.engine._ranks = lambda: [(0, "rank 0", "ready", 7, 0.0), (1, "spark-2", "ready", 7, 0.5)]
    assert api.get("/status").json()["ranks"][1] == {
        "rank": 1, "name": "spark-2", "state": "ready", "ticks": 7, "silent_seconds": 0.5,
    }  # fmt: skip
    api.engine.fail("the device is lost")
    failed = api.get("/status").json()
    assert failed["state"] == "failed" and failed["failure"] == "the device is lost"

"""guidellm, a published load generator, completes against the server and agrees with its metrics.

Needs the `guidellm` command (pip install guidellm, in any environment on the PATH).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

REQUESTS = 20


@pytest.mark.slow
def test_guidellm_completes_and_agrees_with_the_metrics(server, tiny: Path, tmp_path: Path):
    command = shutil.which("guidellm")
    if command is None:
        pytest.skip("needs guidellm on the PATH: pip install guidellm")
    before = server.metrics()
    report = tmp_path / "report.json"
    subprocess.run(
        [
            command, "run", "--disable-progress",
            "--backend", f"kind=openai_http,target={server.url}",
            "--profile", "kind=concurrent,streams=4",
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
            "--tokenizer", f"kind=huggingface_auto,model={tiny}",
            "--output", f"kind=json,path={report}",
        ],
        check=True,
        timeout=300,
        cwd=tmp_path,
    )  # fmt: skip
    after = server.metrics()
    found = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    assert found["request_totals"] == {
        "successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS
    }  # fmt: skip

    def grown(name: str) -> float:
        return after[f"sparkjax:{name}"] - before[f"sparkjax:{name}"]

    def mean(name: str) -> float:
        return found[name]["successful"]["mean"]

    assert grown("generation_tokens_total") == mean("output_token_count") * REQUESTS
    assert grown("prompt_tokens_total") == mean("prompt_token_count") * REQUESTS
    assert grown("time_to_first_token_seconds_count") == REQUESTS
    ours = grown("time_to_first_token_seconds_sum") / REQUESTS * 1e3
    # The client's clock starts before ours and stops after it.
    assert 0 < ours <= mean("time_to_first_token_ms")

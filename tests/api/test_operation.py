"""Health, readiness, metrics, logs, failures, signals."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sparkjax.api import logs
from sparkjax.api.admin import Profiler
from sparkjax.settings import Log

from . import fake_engine
from .conftest import Stream, refused

ROOT = Path(__file__).resolve().parents[2]
# The alias set that dashboards look for (counters without their _total).
VLLM = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "cache_config_info",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
]


def samples(api) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(api.get("/metrics").text):
        for sample in family.samples:
            extra = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + ("" if not extra else str(sorted(extra.items())))] = sample.value
    return found


def test_metrics_have_our_names_and_vllm_s(api):
    response = api.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = {f.name: f for f in text_string_to_metric_families(response.text)}
    for name in VLLM:
        for prefix in ("vllm:", "sparkjax:"):
            assert prefix + name in families, prefix + name
    for family in families.values():
        if family.name.startswith("vllm:"):
            for sample in family.samples:
                assert sample.labels["model_name"] == "toy" and sample.labels["engine"] == "0"


def test_metrics_count_what_happened(make_api):
    api = make_api(script=fake_engine.speak("Hello world"))
    api.chat()
    api.stream_chat(n=2, max_tokens=2)
    api.complete(temperature=9)
    found = samples(api)
    prompt = len(api.engine.submitted[0].tokens)
    for prefix in ("vllm:", "sparkjax:"):
        assert found[f"{prefix}generation_tokens_total"] == 3 + 2 * 2
        assert found[f"{prefix}prompt_tokens_total"] == 3 * prompt
        assert found[f"{prefix}prefix_cache_queries_total"] == 3 * prompt
        assert found[f"{prefix}request_success_total[('finished_reason', 'stop')]"] == 1
        assert found[f"{prefix}request_success_total[('finished_reason', 'length')]"] == 2
        assert found[f"{prefix}time_to_first_token_seconds_count"] == 3
        assert found[f"{prefix}e2e_request_latency_seconds_count"] == 3
        assert found[f"{prefix}inter_token_latency_seconds_count"] == 2 + 2 * 1
        assert found[f"{prefix}request_params_n_sum"] == 3
        assert found[f"{prefix}iteration_tokens_total_sum"] == 7 + 3 * prompt
    assert found["sparkjax:requests_refused_total[('code', 'invalid_parameter')]"] == 1
    assert found["sparkjax:engine_ready"] == 1 and found["sparkjax:engine_failed"] == 0
    assert found["sparkjax:kv_pages_total"] == 160 and found["process_resident_memory_bytes"] > 0


def test_metrics_show_what_runs_and_waits(api):
    api.core.step_seconds = 0.005

    async def go() -> None:
        async with api.client() as client:
            body = {"model": "toy", "prompt": "x", "n": 6, "max_tokens": 60}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            while api.engine.gauges().waiting != 2:
                await asyncio.sleep(0.005)
            text = (await client.get("/metrics")).text
            assert 'sparkjax:num_requests_running{engine="0",model_name="toy"} 4.0' in text
            assert 'vllm:num_requests_waiting{engine="0",model_name="toy"} 2.0' in text
            usage = re.search(r"vllm:kv_cache_usage_perc\{.*\} ([\d.]+)", text)
            assert usage and 0 < float(usage[1]) < 1
            await asking

    asyncio.run(go())


# --- Health -----------------------------------------------------------------------------------------


def test_T55_a_hung_engine_fails_liveness_within_a_bound(make_api):
    api = make_api(stall_seconds=0.2)
    assert api.get("/health").json() == {"status": "ok", "model": "toy"}
    time.sleep(0.3)
    assert api.get("/health").status_code == 200  # idle is not hung
    api.core.running.clear()

    async def go() -> None:
        async with api.client() as client:
            body = {"model": "toy", "prompt": "x", "max_tokens": 3}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            assert (await client.get("/health")).status_code == 200
            await asyncio.sleep(0.4)
            hung = await client.get("/health")
            assert hung.status_code == 503 and hung.json()["status"] == "stalled"
            assert (await client.get("/ready")).status_code == 503
            api.core.running.set()
            assert (await asking).status_code == 200
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 200

    asyncio.run(go())


def test_T55_liveness_and_readiness_are_separate(api):
    assert api.get("/ready").json() == {"status": "ready"}
    api.engine.drain()
    assert api.get("/health").status_code == 200
    response = api.get("/ready")
    assert response.status_code == 503 and response.json() == {"status": "draining"}
    assert "retry-after" in response.headers


def test_a_server_that_drains_finishes_and_takes_nothing_new(api):
    api.core.step_seconds = 0.005

    async def go() -> None:
        async with api.client() as client:
            body = {"model": "toy", "prompt": "x", "max_tokens": 50, "stream": True}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            while not api.core.started:
                await asyncio.sleep(0.005)
            api.engine.drain()
            response = await client.post("/v1/completions", json=body)
            refused(response, 503, code="server_shutdown")
            assert "retry-after" in response.headers
            stream = Stream(await asking)
            assert stream.done and stream.finish() == "length" and len(stream.text()) == 50

    asyncio.run(go())


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_failure_reaches_every_client(api, stream):
    api.core.step_seconds = 0.005

    async def go() -> None:
        async with api.client() as client:
            body = {"model": "toy", "prompt": "x", "max_tokens": 400, "stream": stream, "n": 2}
            asking = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)
            ]
            while len(api.core.started) < 4:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            api.core.crash = RuntimeError("the device is lost")
            for response in await asyncio.gather(*asking):
                if not stream:
                    assert "the device is lost" in refused(response, 503, code="engine_failure")
                    continue
                found = Stream(response)
                assert found.done and found.chunks[-1]["error"]["code"] == "engine_failure"
                assert all(c["finish_reason"] is None for i in range(2) for c in found.choices(i))
            refused(await client.post("/v1/completions", json=body), 503, code="engine_failure")
            health = await client.get("/health")
            assert health.status_code == 503 and "the device is lost" in health.json()["error"]
            assert (await client.get("/ready")).json() == {"status": "failed"}
            assert 'finished_reason="error"' in (await client.get("/metrics")).text

    asyncio.run(go())
    assert not api.front.jobs


def test_a_crash_in_a_route_is_500_and_tells_nothing(api, monkeypatch):
    monkeypatch.setattr(type(api.front.metrics), "render", lambda self: 1 / 0)
    response = api.get("/metrics")
    assert refused(response, 500, code="internal_error") == "internal error"
    assert api.get("/health").status_code == 200


# --- Logs -------------------------------------------------------------------------------------------


def log_lines(caplog) -> list[dict]:
    return [r.fields for r in caplog.records if r.name == "sparkjax.request"]


def test_one_line_a_request(api, caplog):
    with caplog.at_level(logging.INFO):
        answer = api.post("/v1/completions", {"model": "toy", "prompt": "secret words", "max_tokens": 3},
                          headers={"X-Request-Id": "r-1"}).json()  # fmt: skip
        api.complete(temperature=7)
        api.get("/health")
    first, second = log_lines(caplog)
    assert first["request"] == "r-1" and first["completion"] == answer["id"]
    assert (first["status"], first["model"], first["finish"]) == (200, "toy", "length")
    assert (first["prompt_tokens"], first["completion_tokens"]) == (12, 3)
    assert 0 <= first["ttft_ms"] <= first["duration_ms"]
    assert second["status"] == 400 and second["code"] == "invalid_parameter"
    assert "secret" not in caplog.text


def test_prompts_are_logged_only_when_asked(make_api, caplog):
    api = make_api(log=Log(prompts=True))
    with caplog.at_level(logging.INFO):
        api.chat("secret words")
    assert "secret words" in log_lines(caplog)[0]["prompt"]


def test_log_forms():
    def line(formatter, **fields) -> str:
        record = logging.LogRecord("n", logging.INFO, "", 0, "request", (), None)
        record.fields = fields
        return formatter.format(record)

    text = line(logs.TextFormatter(), status=200, error='a "b"\nc', empty="")
    assert text.endswith('INFO n request status=200 error="a \\"b\\"\\nc" empty=""')
    found = json.loads(line(logs.JsonFormatter(), status=200, error="x\ny"))
    assert found["status"] == 200 and found["level"] == "info" and found["error"] == "x\ny"


def test_log_configuration_keeps_others_quiet(monkeypatch):
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    level, out = root.level, io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    try:
        logs.configure(Log(format="json", level="debug"))
        logging.getLogger("sparkjax.x").debug("hello")
        logging.getLogger("uvicorn.access").info("noise")
        assert [json.loads(each)["message"] for each in out.getvalue().splitlines()] == ["hello"]
    finally:
        root.handlers[:] = before
        root.setLevel(level)


# --- The profiler -----------------------------------------------------------------------------------


def test_profiles_are_recorded_from_this_host_only(make_api, tmp_path):
    calls: list = []
    api = make_api(profiler=Profiler(calls.append, lambda: calls.append("stop")))
    target = str(tmp_path / "trace" / "one")
    answer = api.post("/admin/profile", {"directory": target, "seconds": 0.01})
    assert answer.json() == {"directory": target, "seconds": 0.01}
    assert calls == [target, "stop"] and Path(target).is_dir()
    for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP"):
        refused(api.post("/admin/profile", {"directory": target}, headers={header: "1.2.3.4"}), 403)
    refused(api.post("/admin/profile", {}), 400, "directory")
    refused(api.post("/admin/profile", {"directory": "relative"}), 400, "directory")
    refused(api.post("/admin/profile", {"directory": target, "seconds": 601}), 400, "seconds")
    refused(api.post("/admin/profile", {"directory": "/proc/nothing/here"}), 400, "directory")

    async def from_afar() -> httpx.Response:
        async with api.client(client=("10.0.0.7", 5)) as client:
            return await client.post("/admin/profile", json={"directory": target})

    refused(asyncio.run(from_afar()), 403, code="not_local")


def test_one_profile_at_a_time(make_api, tmp_path):
    api = make_api(profiler=Profiler(lambda directory: None, lambda: None))

    async def go() -> list[int]:
        async with api.client() as client:
            body = {"directory": str(tmp_path), "seconds": 0.2}
            both = [client.post("/admin/profile", json=body) for _ in range(2)]
            return [response.status_code for response in await asyncio.gather(*both)]

    assert sorted(asyncio.run(go())) == [200, 409]
    assert (
        api.post("/admin/profile", {"directory": str(tmp_path), "seconds": 0.01}).status_code == 200
    )


# --- The process ------------------------------------------------------------------------------------

CHILD = """
import socket, sys, threading, time
from sparkjax.api import logs, server
from sparkjax.settings import Log
from tests.api.conftest import Api
logs.configure(Log())
drain, watchdog = float(sys.argv[1]), float(sys.argv[2])
api = Api(drain_seconds=drain)
api.core.step_seconds = 0.02
sock = socket.create_server(("127.0.0.1", 0))
print(sock.getsockname()[1], flush=True)
def orders():
    for line in sys.stdin:
        if line.strip() == "crash":
            api.core.crash = RuntimeError("the device is lost")
        elif line.strip() == "hang":
            api.core.running.clear()
threading.Thread(target=orders, daemon=True).start()
sys.exit(server.run(api.app, api.engine, api.http, sock, watchdog_seconds=watchdog))
"""


class Child:
    """A server in a process of its own."""

    def __init__(self, drain: float = 30.0, watchdog: float = 120.0):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(drain), str(watchdog)], cwd=ROOT, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"
        self.errors = ""
        for _ in range(200):
            try:
                httpx.get(f"{self.url}/ready")
                return
            except httpx.ConnectError:
                time.sleep(0.05)

    def start_stream(self, tokens: int) -> tuple[threading.Thread, list[str]]:
        """A client in the background, with the lines that it has read."""
        lines: list[str] = []

        def read() -> None:
            body = {"model": "toy", "prompt": "x", "max_tokens": tokens, "stream": True}
            try:
                with httpx.stream(
                    "POST", f"{self.url}/v1/completions", json=body, timeout=30
                ) as response:
                    lines.extend(line for line in response.iter_lines() if line)
            except httpx.HTTPError as error:
                lines.append(f"cut: {error}")

        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(400):
            if (
                'num_requests_running{engine="0",model_name="toy"} 1.0'
                in httpx.get(f"{self.url}/metrics").text
            ):
                return thread, lines
            time.sleep(0.01)
        raise AssertionError("the request does not run")

    def order(self, word: str) -> None:
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self, seconds: float = 15.0) -> int:
        _, self.errors = self.process.communicate(timeout=seconds)
        return self.process.returncode

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def test_the_first_sigterm_drains_and_exits_with_0():
    with Child() as child:
        thread, lines = child.start_stream(60)
        child.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert httpx.get(f"{child.url}/ready").json() == {"status": "draining"}
        assert httpx.get(f"{child.url}/health").status_code == 200
        refused(
            httpx.post(f"{child.url}/v1/completions", json={"model": "toy", "prompt": "x"}), 503
        )
        assert child.end() == 0
        thread.join()
        assert lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2]


def test_a_drain_is_bounded_and_the_rest_is_told():
    with Child(drain=0.5) as child:
        thread, lines = child.start_stream(400)
        child.process.send_signal(signal.SIGINT)
        start = time.monotonic()
        assert child.end() == 0
        assert time.monotonic() - start < 6
        thread.join()
        assert lines[-1] == "data: [DONE]" and "server_shutdown" in lines[-2]


def test_the_second_signal_ends_at_once():
    with Child() as child:
        thread, lines = child.start_stream(400)
        child.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        child.process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        assert child.end(5) == 128 + signal.SIGTERM
        assert time.monotonic() - start < 2
        thread.join()
        assert "ending at once" in child.errors and lines[-1].startswith("cut")


def test_an_engine_failure_ends_the_process_with_2():
    with Child() as child:
        thread, lines = child.start_stream(400)
        child.order("crash")
        assert child.end() == 2
        thread.join()
        assert lines[-1] == "data: [DONE]" and "engine_failure" in lines[-2]
        assert "the device is lost" in child.errors


def test_T55_the_watchdog_ends_a_hung_engine_with_2():
    with Child(watchdog=0.5) as child:
        thread, lines = child.start_stream(400)
        child.order("hang")
        assert child.end() == 2
        thread.join()
        assert lines[-1] == "data: [DONE]" and "no progress" in lines[-2]

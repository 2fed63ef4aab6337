"""Bounds: sizes, keys, rates, queues, and where a request may come from."""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
import time

import httpx
import msgspec
import pytest

from sparkjax.api.app import create_app, loopback
from sparkjax.api.errors import ApiError
from sparkjax.api.keys import Keys, RateLimit
from sparkjax.settings import Http

from . import fake_engine, toy
from .conftest import refused

KEYS = "# people\nalice-key\n\n  bob-key  \nschlüssel\n"
ROUTES = [
    ("GET", "/ready"), ("GET", "/metrics"), ("GET", "/v1/models"), ("GET", "/v1/models/toy"),
    ("GET", "/status"), ("GET", "/openapi.json"), ("GET", "/nothing"), ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", "/admin/profile"),
    ("GET", "/health/"), ("GET", "/health//"), ("POST", "/v1/responses"), ("POST", "/v1/score"),
]  # fmt: skip


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keyed(make_api, tmp_path):
    file = tmp_path / "keys"
    file.write_text(KEYS)
    return make_api(api_keys=str(file))


@pytest.mark.parametrize("method,path", ROUTES)
def test_every_route_but_liveness_asks_for_a_key(keyed, method, path):
    for headers in ({}, bearer("mallory"), bearer(""), {"Authorization": "alice-key"},
                    {"Authorization": "Basic alice-key"}, bearer("alice-key2"), bearer("# people")):  # fmt: skip
        response = keyed.request(method, path, headers=headers)
        refused(response, 401, code="invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert keyed.request(method, path, headers=bearer("alice-key")).status_code != 401
    assert keyed.get("/health").status_code == 200


def test_all_keys_of_the_file_work(keyed):
    for key in ("alice-key", "bob-key"):
        assert keyed.get("/v1/models", headers=bearer(key)).status_code == 200
    assert keyed.get("/v1/models", headers={"Authorization": "bearer bob-key"}).status_code == 200


def test_an_empty_key_file_does_not_open_the_server(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# nothing\n\n")
    with pytest.raises(ValueError, match="no API key"):
        create_app(toy.make_served(), fake_engine.FakeEngine(), Http(api_keys=str(file)))
    with pytest.raises(OSError):
        Keys.read(tmp_path / "missing")


def test_all_keys_are_compared_whichever_fits(monkeypatch):
    keys, seen = Keys(["a", "b", "c"]), []
    compare = hmac.compare_digest
    monkeypatch.setattr(
        "sparkjax.api.keys.hmac.compare_digest", lambda x, y: seen.append(1) or compare(x, y)
    )
    keys.check("Bearer a")
    with pytest.raises(ApiError):
        keys.check("Bearer nobody")
    assert len(seen) == 6


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_a_loud_warning_beyond_loopback_without_keys(host, caplog, tmp_path):
    def warnings(**options) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            create_app(toy.make_served(), fake_engine.FakeEngine(), Http(**options))
        return [r.getMessage() for r in caplog.records]

    assert "ANYONE" in warnings(host=host)[0]
    assert warnings(host="127.0.0.1") == warnings(host="localhost") == warnings(host="::1") == []
    file = tmp_path / "keys"
    file.write_text("k\n")
    assert warnings(host=host, api_keys=str(file)) == []
    assert not loopback(host)


def test_rate_limit_of_each_key(make_api, tmp_path):
    file = tmp_path / "keys"
    file.write_text("a\nb\n")
    api = make_api(api_keys=str(file), requests_per_minute=3)
    body = {"model": "toy", "prompt": "x", "max_tokens": 1}
    for _ in range(3):
        assert api.post("/v1/completions", body, headers=bearer("a")).status_code == 200
    response = api.post("/v1/completions", body, headers=bearer("a"))
    refused(response, 429, code="rate_limit_exceeded")
    assert 1 <= int(response.headers["retry-after"]) <= 20
    assert api.post("/v1/completions", body, headers=bearer("b")).status_code == 200
    assert api.get("/v1/models", headers=bearer("a")).status_code == 200  # reading is free
    assert api.get("/metrics", headers=bearer("a")).status_code == 200


def test_rate_limit_refills_evenly():
    now = [0.0]
    limit = RateLimit(60, clock=lambda: now[0])
    for _ in range(60):
        limit.check("k")
    with pytest.raises(ApiError) as caught:
        limit.check("k")
    assert caught.value.headers["Retry-After"] == "1"
    now[0] += 1.0
    limit.check("k")
    with pytest.raises(ApiError):
        limit.check("k")
    now[0] += 3600
    for _ in range(60):
        limit.check("k")
    with pytest.raises(ApiError):
        limit.check("k")


def test_request_ids_are_echoed_as_labels(api, caplog):
    assert (
        api.get("/health", headers={"X-Request-Id": "my-label.1"}).headers["x-request-id"]
        == "my-label.1"
    )
    for bad in ("a b", "x" * 129, "", "ü".encode(), b"a\x7f", "<script>", "a;b"):
        label = api.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert label.startswith("req-")
    labels = {api.get("/nothing").headers["x-request-id"] for _ in range(3)}
    assert len(labels) == 3
    answer = api.post(
        "/v1/completions", {"model": "toy", "prompt": "x"}, headers={"X-Request-Id": "me"}
    )
    assert answer.headers["x-request-id"] == "me" and "me" not in answer.json()["id"]


def test_unknown_routes_and_methods(api):
    assert "/nothing" in refused(api.get("/nothing"), 404)
    response = api.get("/v1/chat/completions")
    assert "GET" in refused(response, 405)
    assert "POST" in response.headers["allow"]
    refused(api.get("/v1/models/other"), 404, "model", "model_not_found")
    assert api.get("/v1/models/org/toy-alias").json()["root"] == "toy"


def test_bodies_over_the_cap(make_api):
    api = make_api(max_body_bytes=2000)
    refused(api.complete("x" * 2000), 413, "body", "request_too_large")
    assert api.complete("x" * 100).status_code == 200


def test_content_types(api):
    def post(kind: str | None) -> httpx.Response:
        headers = {} if kind is None else {"Content-Type": kind}
        return api.request(
            "POST", "/v1/completions", content=b'{"model":"toy","prompt":"x"}', headers=headers
        )

    for kind in (
        None,
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/vnd.x+json",
    ):
        assert post(kind).status_code == 200, kind
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json"):
        refused(post(kind), 415, code="unsupported_media_type")


def test_web_pages_of_others_may_not_call_a_server_without_keys(make_api):
    api = make_api()
    origin = {"Origin": "https://evil.example"}
    refused(api.get("/v1/models", headers=origin), 403, code="origin_not_allowed")
    assert api.get("/v1/models", headers={"Origin": "http://server"}).status_code == 200
    api = make_api(cors_origins=("https://good.example",))
    refused(api.get("/v1/models", headers=origin), 403)
    response = api.get("/v1/models", headers={"Origin": "https://good.example"})
    assert response.headers["access-control-allow-origin"] == "https://good.example"
    preflight = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
    assert api.request("OPTIONS", "/v1/completions", headers=preflight).status_code == 200
    assert make_api(cors_origins=("*",)).get("/v1/models", headers=origin).status_code == 200


def test_errors_carry_cors_headers_too(make_api):
    api = make_api(cors_origins=("https://good.example",))
    response = api.get("/nothing", headers={"Origin": "https://good.example"})
    refused(response, 404)
    assert "access-control-allow-origin" in response.headers


# --- Lengths ----------------------------------------------------------------------------------------


def test_over_long_prompts_name_field_and_limit(api):
    message = refused(api.complete("x" * 513), 400, "prompt", "context_length_exceeded")
    assert "513" in message and "512" in message
    refused(api.complete([65] * 513), 400, "prompt", "context_length_exceeded")
    refused(api.chat("x" * 600), 400, "messages", "context_length_exceeded")
    message = refused(
        api.complete("x" * 500, max_tokens=13), 400, "max_tokens", "context_length_exceeded"
    )
    assert "512" in message
    assert api.complete("x" * 500, max_tokens=12).status_code == 200
    assert api.engine.calls["submit"] == 1


def test_an_answer_without_a_limit_fills_the_context(make_api):
    api = make_api()
    usage = api.chat(temperature=0).json()["usage"]
    assert usage["total_tokens"] == 512
    api = make_api(served=toy.make_served(default_max_tokens=9))
    assert api.chat().json()["usage"]["completion_tokens"] == 9
    # A pool that is smaller than the context bounds it as well.
    api = make_api(limits=msgspec.structs.replace(fake_engine.LIMITS, pages=4))
    assert api.chat().json()["usage"]["total_tokens"] == 64
    card = api.get("/v1/models/toy").json()
    assert card["max_model_len"] == 64 and card["context"]["limited_by"] == "kv-pool"
    refused(api.chat("x" * 80), 400, "messages", "context_length_exceeded")


@pytest.mark.parametrize(
    "text", ["hello world " * 90_000, "a" * 1_000_000, "😀" * 250_000, "<|im_end|>" * 100_000]
)
def test_a_megabyte_is_refused_in_bounded_time_while_a_stream_goes_on(make_socket, text):
    server = make_socket(max_body_bytes=8 << 20)
    server.api.core.step_seconds = 0.005
    gaps: list[float] = []

    def stream() -> None:
        body = {"model": "toy", "prompt": "x", "max_tokens": 150, "stream": True}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, timeout=30
        ) as response:
            last = time.monotonic()
            for _ in response.iter_lines():
                now = time.monotonic()
                gaps.append(now - last)
                last = now

    watching = threading.Thread(target=stream)
    watching.start()
    while len(gaps) < 10:
        time.sleep(0.01)
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        start = time.monotonic()
        response = httpx.post(f"{server.url}{path}", json={"model": "toy", **body}, timeout=30)
        refused(response, 400, code="context_length_exceeded")
        assert time.monotonic() - start < 2
    watching.join()
    assert len(gaps) > 250 and sorted(gaps)[-3] < 0.5


def test_deep_json_over_a_socket(make_socket):
    server = make_socket()
    for raw in (
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ):
        refused(
            httpx.post(f"{server.url}/v1/completions", content=raw), 400, "body", "invalid_json"
        )
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_huge_body_gets_its_413_over_a_socket(make_socket):
    server = make_socket(max_body_bytes=1 << 20)
    refused(httpx.post(f"{server.url}/v1/completions", content=b"x" * (20 << 20)), 413, "body")
    with httpx.Client(base_url=server.url) as client:  # also when refused before the body is read
        refused(client.post("/nothing", content=b"x" * (2 << 20)), 404)
        assert client.get("/health").status_code == 200


# --- Load -------------------------------------------------------------------------------------------


def test_more_answers_than_there_can_be_are_refused_for_good(api):
    refused(api.chat(n=13), 400, "n")  # 4 slots, 8 in the queue
    refused(api.complete(["x"] * 13), 400, "prompt")
    assert api.chat(n=12, max_tokens=2).status_code == 200


def test_overload_is_503_with_retry_after_and_all_or_nothing(api):
    api.core.step_seconds = 0.005

    async def go() -> None:
        async with api.client() as client:
            body = {"model": "toy", "prompt": "x", "n": 10, "max_tokens": 60}
            first = asyncio.create_task(client.post("/v1/completions", json=body))
            while api.engine.gauges().waiting != 6:  # of 8, while 4 run
                await asyncio.sleep(0.005)
            submitted = len(api.engine.submitted)
            response = await client.post("/v1/completions", json=body | {"n": 3})
            refused(response, 503, code="overloaded")
            assert 1 <= int(response.headers["retry-after"]) <= 60
            taken = [each.id for each in api.engine.submitted[submitted:]]
            assert taken and api.engine.calls["cancel"] == len(taken)
            assert (await first).status_code == 200
            assert {api.engine.ended[id] for id in taken} == {"cancelled"}
            assert not set(taken) & set(api.core.started)
            assert (await client.post("/v1/completions", json=body)).status_code == 200

    asyncio.run(go())
    api.engine.wait_idle()


def test_open_requests_are_bounded(make_api):
    api = make_api(max_connections=1)
    api.core.running.clear()

    async def go() -> None:
        async with api.client() as client:
            body = {"model": "toy", "prompt": "x", "max_tokens": 2}
            first = asyncio.create_task(client.post("/v1/completions", json=body))
            while not api.engine.calls["submit"]:
                await asyncio.sleep(0.01)
            response = await client.get("/v1/models")
            refused(response, 503, code="overloaded")
            assert "retry-after" in response.headers
            assert (await client.get("/health")).status_code == 200
            api.core.running.set()
            assert (await first).status_code == 200

    asyncio.run(go())


def test_prompts_that_wait_to_be_read_are_bounded(api):
    api.front._pending = 256
    response = api.complete()
    refused(response, 503, code="overloaded")
    api.front._pending = 0
    assert api.complete().status_code == 200


def test_keep_alive_comments_in_silence(make_api):
    api = make_api(keep_alive_seconds=0.05)
    api.core.running.clear()
    threading.Timer(0.3, api.core.running.set).start()
    stream = api.stream_chat(max_tokens=3)
    assert len(stream.comments) >= 3 and set(stream.comments) == {": keep-alive"}
    assert len(stream.text()) == 3 and stream.done


def test_tokenize_and_detokenize(make_api):
    api = make_api(served=toy.make_served(add_bos=True))
    answer = api.post(
        "/tokenize", {"model": "toy", "prompt": "ABC é", "return_token_strs": True}
    ).json()
    assert answer == {
        "count": 4, "max_model_len": 512, "tokens": [toy.BOS, 259, 32, 268],
        "token_strs": ["<|bos|>", "ABC", " ", "é"],
    }  # fmt: skip
    bare = api.post("/tokenize", {"prompt": "ABC é", "add_special_tokens": False}).json()
    assert bare["tokens"] == [259, 32, 268] and bare["token_strs"] is None
    talk = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = api.post("/tokenize", talk).json()["tokens"]
    api.post("/v1/chat/completions", {"model": "toy", "max_tokens": 1, **talk})
    assert tuple(tokens) == api.engine.submitted[-1].tokens
    open_turn = api.post("/tokenize", talk | {"add_generation_prompt": False}).json()["tokens"]
    assert len(open_turn) < len(tokens)
    text = api.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (
        api.post("/tokenize", {"prompt": "x" * 3000}).json()["count"] == 3001
    )  # counting is no request
    refused(api.post("/tokenize", {}), 400, "prompt")
    refused(api.post("/tokenize", {"prompt": "x", **talk}), 400, "prompt")
    refused(api.post("/tokenize", {"prompt": 5}), 400, "prompt")
    refused(api.post("/tokenize", {"model": "other", "prompt": "x"}), 404, "model")
    refused(api.post("/detokenize", {}), 400, "tokens")
    refused(api.post("/detokenize", {"tokens": [1, -1]}), 400, "tokens[1]")
    refused(api.post("/detokenize", {"tokens": "x"}), 400, "tokens")


def test_models(api):
    listed = api.get("/v1/models").json()
    assert [m["id"] for m in listed["data"]] == ["toy", "org/toy-alias"]
    card = api.get("/v1/models/toy").json()
    assert card == listed["data"][0]
    assert card["context"] == {
        "request_limit_tokens": 512, "position_ceiling_tokens": 512, "kv_pool_tokens": 2560,
        "limited_by": "position-ceiling",
    }  # fmt: skip
    assert card["sampling"]["defaults"]["temperature"] == 0.7

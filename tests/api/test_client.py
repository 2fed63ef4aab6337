"""The official client, over a real socket."""

from __future__ import annotations

import openai
import pytest

from . import fake_engine
from .conftest import Socket

TEXT = "Hello 😀 the world ABCDEF"
ASK = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def server(make_socket) -> Socket:
    return make_socket(script=fake_engine.speak(TEXT))


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_whole_and_streamed(client):
    whole = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == TEXT
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert "".join(e.token for e in whole.choices[0].logprobs.content[:1]) == "Hello"
    stream = client.chat.completions.create(
        **ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == TEXT
    with client.chat.completions.stream(**ASK) as events:
        assert events.get_final_completion().choices[0].message.content == TEXT


def test_text_completions(client):
    whole = client.completions.create(model="toy", prompt="x", echo=True, logprobs=2, stop="CD")
    assert whole.choices[0].text == "x" + TEXT.split("CD")[0]
    assert whole.choices[0].logprobs.tokens[:2] == ["x", "Hello"]
    stream = client.completions.create(model="toy", prompt=["x", [65]], stream=True)
    texts = ["", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [TEXT, TEXT]


def test_errors_have_the_client_s_classes(client, server):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, temperature=3)
    assert caught.value.param == "temperature" and caught.value.code == "invalid_parameter"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**ASK | {"model": "other"})
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    server.api.engine.drain()
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(**ASK)
    assert caught.value.status_code == 503 and caught.value.code == "server_shutdown"


def test_a_failure_in_a_stream_is_raised(client, server):
    server.api.core.step_seconds = 0.02
    with pytest.raises(openai.APIError, match="the device is lost"):
        for chunk in client.chat.completions.create(**ASK, stream=True):
            if chunk.choices[0].delta.content:
                server.api.core.crash = RuntimeError("the device is lost")


def test_models(client):
    assert [m.id for m in client.models.list()] == ["toy", "org/toy-alias"]
    assert client.models.retrieve("org/toy-alias").owned_by == "sparkjax"


def test_keys(make_socket, tmp_path):
    file = tmp_path / "keys"
    file.write_text("right\n")
    server = make_socket(api_keys=str(file))
    for key, fine in (("right", True), ("wrong", False)):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            if fine:
                assert client.chat.completions.create(**ASK, max_tokens=2).choices
            else:
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()


def test_leaving_a_stream_cancels(client, server):
    server.api.core.script = fake_engine.babble
    server.api.core.step_seconds = 0.01
    stream = client.chat.completions.create(**ASK, stream=True)
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    stream.close()
    server.api.engine.wait_idle()
    assert set(server.api.engine.ended.values()) == {"cancelled"}

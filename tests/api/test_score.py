"""Scores of texts, log-probabilities of prompts, timings."""

from __future__ import annotations

import msgspec
import pytest

from . import fake_engine, toy

TEXT = "Hello the world"


def test_a_score_is_the_sum_over_the_second_text(api):
    body = {"model": "toy", "text_1": "Hello", "text_2": [" world", " the x"]}
    found = api.post("/v1/score", body).json()
    assert found["object"] == "list" and [e["index"] for e in found["data"]] == [0, 1]
    for entry, text in zip(found["data"], body["text_2"], strict=True):
        echoed = api.complete("Hello" + text, echo=True, max_tokens=0, logprobs=1).json()["choices"][0]
        logprobs = echoed["logprobs"]["token_logprobs"][1:]
        assert entry["token_logprobs"] == pytest.approx(logprobs)
        assert entry["score"] == pytest.approx(sum(logprobs))
        assert entry["tokens"] == len(logprobs) == len(toy.make_tokenizer().encode(text))
        assert entry["greedy"] is False
    assert found["usage"]["completion_tokens"] == 0


def test_the_first_token_of_all_has_no_score(api):
    one = api.post("/v1/score", {"model": "toy", "text_1": "", "text_2": "AB"}).json()["data"][0]
    assert one["tokens"] == 1
    refused = api.post("/v1/score", {"model": "toy", "text_1": "", "text_2": "A"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "text_2"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"text_1": None}, "text_1"),
        ({"text_1": []}, "text_1"),
        ({"text_1": [5]}, "text_1[0]"),
        ({"text_2": ["a", ""]}, "text_2[1]"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ({"text_2": "x" * 2000}, "text_2"),
        ({"model": None}, "model"),
    ],
)
def test_scores_refuse_by_name(api, fields, param):
    response = api.post("/v1/score", {"model": "toy", "text_1": "a", "text_2": "b", **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_prompt_logprobs_of_completions_and_chats(api):
    whole = api.complete("Hello", prompt_logprobs=2, max_tokens=1, n=2).json()
    for choice in whole["choices"]:
        assert choice["prompt_logprobs"] == [None]  # "Hello" is one token, and nothing precedes it
    entries = api.complete("Hello world", prompt_logprobs=2, max_tokens=1).json()["choices"][0]
    first, second = entries["prompt_logprobs"]
    token = toy.make_tokenizer().encode("Hello world")[1]
    assert first is None and len(second) == 2
    assert second[str(token)]["decoded_token"] == " world" and second[str(token)]["rank"] == 2
    chat = api.chat("hi", prompt_logprobs=0, max_tokens=1).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])


def test_T24_prompt_logprobs_do_not_depend_on_tiles(make_api):
    ids = [32 + i % 90 for i in range(100)]
    found = []
    for tiles in ((16, 32), (128,)):
        limits = msgspec.structs.replace(fake_engine.LIMITS, tiles=tiles)
        api = make_api(limits=limits)
        body = api.complete(ids, prompt_logprobs=1, max_tokens=1, temperature=0).json()
        found.append(body["choices"][0]["prompt_logprobs"])
    assert found[0] == found[1] and len(found[0]) == len(ids)


def test_prompt_logprobs_need_a_whole_answer(api):
    response = api.complete("x", prompt_logprobs=1, stream=True)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt_logprobs"
    assert api.complete("x", prompt_logprobs=21).status_code == 400


def test_timings_say_how_fast_it_was(make_api):
    api = make_api(script=fake_engine.speak(TEXT))
    whole = api.chat("hi").json()
    stream = api.stream_chat("hi", stream_options={"include_usage": True})
    for body in (whole, stream.chunks[-1], api.stream_chat("hi").chunks[-1]):
        timings = body["timings"]
        assert timings["prompt_n"] + timings["cache_n"] == whole["usage"]["prompt_tokens"]
        assert timings["predicted_n"] == whole["usage"]["completion_tokens"]
        for name in ("queue_ms", "prompt_ms", "predicted_ms"):
            assert timings[name] >= 0
        assert timings["prompt_per_second"] is None or timings["prompt_per_second"] > 0
    assert sum("timings" in chunk for chunk in stream.chunks) == 1


def test_what_a_client_needs_to_prepare_prompts(api):
    info = api.get("/tokenizer_info").json()
    assert info["bos_token"] == "<|bos|>" and info["eos_token"] == "<|im_end|>"
    assert info["chat_template"] == toy.TEMPLATE and info["add_bos_token"] is False

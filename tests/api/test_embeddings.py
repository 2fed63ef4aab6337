"""Texts as vectors, over HTTP and in the library."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from sparkjax import Model

from . import toy

GOLDEN = Path(__file__).parents[1] / "golden" / "llama"


def vector(tokens) -> np.ndarray:
    made = np.array([len(tokens), sum(tokens) % 97, 3.0, 4.0], np.float32)
    return made / np.linalg.norm(made)


@pytest.fixture
def api(make_api):
    return make_api(served=toy.make_served(embed=vector, embed_tokens=100))


def ask(api, input, **fields):
    return api.post("/v1/embeddings", {"model": "toy", "input": input, **fields})


def test_texts_become_vectors(api):
    encode = toy.make_tokenizer().encode
    body = ask(api, ["Hello", "Hello world"]).json()
    assert body["object"] == "list" and body["model"] == "toy"
    for i, text in enumerate(["Hello", "Hello world"]):
        assert body["data"][i]["index"] == i and body["data"][i]["object"] == "embedding"
        assert body["data"][i]["embedding"] == pytest.approx(vector(encode(text)).tolist())
    tokens = len(encode("Hello")) + len(encode("Hello world"))
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    ids = ask(api, [encode("Hello"), encode("Hello world")]).json()
    assert ids["data"] == body["data"]


def test_vectors_in_base64_and_cut(api):
    plain = ask(api, "Hello", dimensions=2).json()["data"][0]["embedding"]
    assert np.linalg.norm(plain) == pytest.approx(1)
    raw = base64.b64decode(ask(api, "Hello", dimensions=2, encoding_format="base64").json()["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4").tolist() == pytest.approx(plain)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", 5]}, "input[1]"),
        ({"input": "x" * 200}, "input"),
        ({"dimensions": 9}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_embeddings_refuse_by_name(api, fields, param):
    response = api.post("/v1/embeddings", {"model": "toy", "input": "x", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_without_a_pooling_there_are_no_embeddings(make_api):
    error = ask(make_api(), "x").json()["error"]
    assert error["code"] == "embeddings_unsupported" and "model.pooling" in error["message"]


def test_pooled_states_are_those_of_the_forward_pass():
    model = Model.load(GOLDEN)
    tokens = np.arange(5, 45)
    final = np.asarray(model.forward(tokens).final, np.float32)
    mean = model.embed(tokens, normalize=False)
    np.testing.assert_allclose(mean, final.mean(0), atol=1e-4)
    for tile in (16, 128):
        last = model.embed(tokens, "last", tile=tile)
        np.testing.assert_allclose(last, final[-1] / np.linalg.norm(final[-1]), atol=1e-4)
    np.testing.assert_array_equal(model.embed(tokens), model.embed(tokens))  # nothing stays
    with pytest.raises(ValueError, match="pooling is 'max'"):
        model.embed(tokens, "max")

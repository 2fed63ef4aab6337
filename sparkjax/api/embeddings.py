"""/v1/embeddings: texts as vectors, where the model is served with a pooling."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from . import completions, options, prompts
from .desk import Desk
from .encoding import json_response
from .errors import ApiError
from .fields import Fields
from .translate import Translation

NAMES = Translation({}, {"prompt": "input"})
"""The texts are read as a completion's prompts are, under another name."""


async def embed(desk: Desk, request: Request) -> Response:
    """The handler."""
    values, served = await desk.json(request), desk.front.served
    desk.front.check()
    fields = Fields(values)
    options.check_model(fields, served)
    vectorize = served.embed
    if vectorize is None:
        raise ApiError(
            400, "the model is served without embeddings; model.pooling switches them on",
            param="model", code="embeddings_unsupported",
        )  # fmt: skip
    form = fields.choice("encoding_format", ("float", "base64"), "float")
    dimensions = fields.integer("dimensions", 1, 2**31 - 1)
    fields.string("user")
    limit = min(served.embed_tokens, desk.front.longest)
    try:
        texts = completions.parse_prompts(Fields({"prompt": values.get("input")}), served)
        desk.note(request, values.get("input"))
        data, tokens = [], 0
        for i, text in enumerate(texts):
            prompt = await desk.front.off_loop(prompts.from_raw, served, text, limit)
            vector = np.asarray(await desk.front.off_loop(vectorize, prompt.tokens), np.float32)
            tokens += len(prompt.tokens)
            data.append(
                {"object": "embedding", "index": i, "embedding": _written(vector, dimensions, form)}
            )
            if await request.is_disconnected():  # nobody wants the rest
                break
    except ApiError as error:
        raise NAMES.named(error) from None
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json_response({"object": "list", "data": data, "model": served.id, "usage": usage})


def _written(vector: np.ndarray, dimensions: int | None, form: str | None) -> Any:
    """The first `dimensions` of a vector, of length 1 again, as JSON has it."""
    if dimensions is not None:
        if dimensions > len(vector):
            raise ApiError(
                400, f"dimensions is {dimensions}; allowed: an integer from 1 to {len(vector)}",
                param="dimensions", code="invalid_parameter",
            )  # fmt: skip
        vector = vector[:dimensions] / max(float(np.linalg.norm(vector[:dimensions])), 1e-12)
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()

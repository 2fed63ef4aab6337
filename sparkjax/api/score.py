"""/v1/score: how likely one text is after another, by teacher forcing."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sparkjax.engine.plan import TokenLogprob
from sparkjax.engine.records import Sampling

from . import options, prompts
from .desk import Desk
from .encoding import encode
from .errors import invalid, show
from .fields import Fields
from .job import Job, Work
from .options import Options
from .prompts import Prompt
from .reply import Reply
from .served import ServedModel
from .translate import Translation
from .wire import Whole

MOST_PAIRS = 1024
NAMES = Translation({}, {"prompt": "text_2"})
"""Both texts are one prompt to the engine."""
GREEDY = Options(Sampling(), 0, 1, (), (), False, False, False, prompt_logprobs=1)
"""Nothing is generated; of each prompt token the likeliest one is told beside it."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two texts as one prompt; the tokens from `start` on are scored."""

    prompt: Prompt
    start: int


def parse(body: dict[str, Any], served: ServedModel) -> list[tuple[str, str]]:
    """The pairs of a request: one text_1 goes with every text_2, several go one to one.

    Raises:
      ApiError: 400 or 404, naming the field.
    """
    fields = Fields(body)
    options.check_model(fields, served)
    firsts, seconds = _texts(fields, "text_1"), _texts(fields, "text_2")
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise invalid(
            "text_2", f"has {len(seconds)} texts; allowed: {len(firsts)}, as many as text_1"
        )
    for i, second in enumerate(seconds):
        if not second:
            raise invalid(f"text_2[{i}]", "is empty; allowed: a text with at least one token")
    return list(zip(firsts, seconds, strict=True))


def _texts(fields: Fields, name: str) -> list[str]:
    value = fields.values.get(name)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not 0 < len(value) <= MOST_PAIRS:
        raise fields.wrong(name, f"a string or 1 to {MOST_PAIRS} strings")
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise invalid(f"{name}[{i}]", f"is {show(text)}; allowed: a string")
    return value


def pair(served: ServedModel, first: str, second: str, limit: int) -> Pair:
    """One pair as tokens of the joint text, as the model would read it.

    What both texts share with the first alone is its context; the rest is scored. At least one
    token is: nothing predicts the very first.

    Raises:
      ApiError: they are longer than `limit` tokens.
    """
    joint = prompts.from_raw(served, first + second, limit)
    context = prompts.from_raw(served, first, limit).tokens if first else joint.tokens[: joint.added]
    same = 0
    while same < min(len(context), len(joint.tokens)) and context[same] == joint.tokens[same]:
        same += 1
    start = max(min(same, len(joint.tokens) - 1), 1)
    if start >= len(joint.tokens):
        raise invalid("text_2", "is one token that nothing stands before; allowed: more text")
    return Pair(joint, start)


def entry(index: int, pair: Pair, scored: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    """The answer for one pair. `score` is the sum of the log-probabilities (natural logarithm)."""
    found = scored[pair.start - 1 :]
    return {
        "index": index,
        "object": "score",
        "score": sum(each.logprob for each in found),
        "tokens": len(found),
        "greedy": all(each.top[:1] and each.top[0][0] == each.token for each in found),
        "token_logprobs": [each.logprob for each in found],
    }


class ScoreReply(Reply):
    """Answers with one entry a pair; `prepare` gives the pairs in place of a Wire."""

    async def _whole(self, job: Job, work: Work, wire: Any) -> Response:
        wholes = [Whole() for _ in work.prompts]
        async for batch in job.pieces(self._silence):
            for index, piece in batch:
                wholes[index].add(piece)
        entries = [
            entry(i, pair, whole.prompt_logprobs)
            for i, (pair, whole) in enumerate(zip(wire, wholes, strict=True))
        ]
        body = {
            "id": self._id,
            "object": "list",
            "created": self._created,
            "model": self._front.served.id,
            "data": entries,
            "usage": job.usage.json(),
        }
        return Response(encode(body), media_type="application/json")


async def score(desk: Desk, request: Request) -> Response:
    """The handler of /v1/score."""
    arrived, served, front = time.monotonic(), desk.front.served, desk.front
    values = await desk.json(request)
    front.check()
    texts = parse(values, served)
    desk.note(request, texts)

    def read() -> list[Pair]:
        return [pair(served, *each, front.longest) for each in texts]

    async def prepare() -> tuple[Work, Any]:
        pairs = await front.off_loop(read)
        work = Work(tuple(each.prompt for each in pairs), GREEDY, "text_2", True, 1)
        return work, pairs

    return ScoreReply(
        front, prepare, id_prefix="score-", arrived=arrived, silence=desk.http.keep_alive_seconds,
        named=NAMES.named,
    )  # fmt: skip

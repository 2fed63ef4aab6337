"""What chat and completion requests have in common: from JSON fields to the engine's records."""

from __future__ import annotations

import dataclasses
from typing import Any

from sparkjax.engine.records import Sampling

from . import structured
from .errors import ApiError, invalid, show, unsupported
from .fields import Fields, token_ids
from .served import ServedModel

MOST_CHOICES = 128
MOST_BIASES = 1024
MOST_STOP_IDS = 32
MOST_PROMPT_LOGPROBS = 20
LONGEST_STOP = 1024
"""Characters of a stop string."""
LARGEST = 2**31 - 1

COMMON = frozenset(
    ["model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
     "repetition_penalty", "seed", "n", "stop", "stop_token_ids", "ignore_eos", "logit_bias",
     "logprobs", "prompt_logprobs", "max_tokens", "stream", "stream_options", "user", "safety_identifier", "metadata",
     "prompt_cache_key", "service_tier", "prefix_cache", "sse_ping_interval",
     *structured.FIELDS]
)  # fmt: skip

STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
"""What `stream_options` may switch on."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How to answer.

    Attributes:
      sampling: of choice 0; choice i has `seed + i`.
      max_tokens: None takes what the context leaves.
      n: choices for each prompt.
      stops: stop strings; `stop_ids` are tokens that end the answer.
      constraint: what the answer has to follow, None for nothing.
      include_usage: a stream ends with a chunk of usage.
      prompt_logprobs: alternatives that are told of every prompt token, None for nothing.
      obfuscation: chunks are padded, so that their sizes tell little about the text.
      ping: seconds of silence in a stream before a comment; -1 is never, None the server's own.
      echo: labels that a whole answer gives back.
      continuous_usage: with it, every chunk has the usage so far (vLLM's continuous_usage_stats).
    """

    sampling: Sampling
    max_tokens: int | None
    n: int
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    constraint: structured.Constraint | None = None
    prompt_logprobs: int | None = None
    obfuscation: bool = False
    ping: int | None = None
    echo: dict[str, Any] = dataclasses.field(default_factory=dict)

    def sampling_of(self, choice: int) -> Sampling:
        """The sampling of one choice."""
        if choice == 0:
            return self.sampling
        seed = (self.sampling.seed + choice) % 2**64
        return Sampling(
            **{f: getattr(self.sampling, f) for f in Sampling.__struct_fields__} | {"seed": seed}
        )


def check_model(fields: Fields, served: ServedModel) -> None:
    """Raises ApiError unless the request is for the served model."""
    name = fields.string("model")
    if name is None:
        raise fields.wrong("model", show(served.id))
    if name not in served.names:
        raise ApiError(
            404,
            f"model {show(name)} is not served here; allowed: {', '.join(map(show, served.names))}",
            param="model",
            code="model_not_found",
        )


def read(
    fields: Fields,
    served: ServedModel,
    fresh_seed: int,
    max_tokens: int | None,
    logprobs: int | None,
) -> Options:
    """The options of a request whose `max_tokens` and `logprobs` are read already.

    Args:
      fresh_seed: used where the request names none.
    """
    stream = fields.boolean("stream", False)
    _check_labels(fields)
    return Options(
        sampling=_sampling(fields, served, fresh_seed, logprobs),
        max_tokens=max_tokens,
        n=fields.integer("n", 1, MOST_CHOICES, 1) or 1,
        stops=_stops(fields),
        stop_ids=_stop_ids(fields, served),
        stream=stream,
        constraint=structured.read(fields),
        include_usage=_stream_option(fields, stream, "include_usage"),
        continuous_usage=_stream_option(fields, stream, "continuous_usage_stats"),
        prompt_logprobs=_prompt_logprobs(fields, stream),
        obfuscation=_stream_option(fields, stream, "include_obfuscation"),
        ping=_ping(fields, stream),
        echo=_echo(fields),
    )


def _ping(fields: Fields, stream: bool) -> int | None:
    wanted = fields.integer("sse_ping_interval", -1, LARGEST)
    if wanted == 0:
        raise fields.wrong("sse_ping_interval", "seconds from 1, or -1 for never")
    if wanted is not None and not stream:
        raise invalid("sse_ping_interval", "is only allowed when stream is true")
    return wanted


def _echo(fields: Fields) -> dict[str, Any]:
    echo: dict[str, Any] = {}
    if fields.choice("service_tier", ("auto", "default")) is not None:
        echo["service_tier"] = "default"
    if fields.given("metadata"):
        echo["metadata"] = fields.values["metadata"]
    return echo


def _prompt_logprobs(fields: Fields, stream: bool) -> int | None:
    wanted = fields.integer("prompt_logprobs", 0, MOST_PROMPT_LOGPROBS)
    if wanted is not None and stream:
        raise invalid("prompt_logprobs", f"is {wanted}, which needs stream to be false")
    return wanted


def _sampling(
    fields: Fields, served: ServedModel, fresh_seed: int, logprobs: int | None
) -> Sampling:
    defaults = served.defaults
    top_p = fields.number("top_p", 0, 1, defaults.top_p)
    top_k = fields.integer("top_k", -1, LARGEST, defaults.top_k) or 0
    if top_p == 0:  # no mass at all: the most likely token stays
        top_p, top_k = 1.0, 1
    seed = fields.integer("seed", -(2**63), 2**63 - 1)
    return Sampling(
        temperature=fields.number("temperature", 0, 2, defaults.temperature),
        top_k=0 if top_k < 0 or top_k >= served.vocab_size else top_k,
        top_p=top_p,
        min_p=fields.number("min_p", 0, 1, defaults.min_p),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0),
        repetition_penalty=fields.number(
            "repetition_penalty", 0, 100, defaults.repetition_penalty, above=True
        ),
        seed=fresh_seed if seed is None else seed % 2**64,
        logit_bias=_logit_bias(fields, served),
        logprobs=logprobs,
    )


def _logit_bias(fields: Fields, served: ServedModel) -> tuple[tuple[int, float], ...]:
    given = fields.object("logit_bias")
    if given is None:
        return ()
    if len(given.values) > MOST_BIASES:
        raise fields.wrong("logit_bias", f"an object of at most {MOST_BIASES}")
    found: dict[int, float] = {}
    for key in given.values:
        token = int(key) if key.isascii() and key.isdecimal() and len(key) <= 10 else -1
        if not 0 <= token < served.vocab_size:
            allowed = f"token ids from 0 to {served.vocab_size - 1} in decimal digits"
            raise invalid("logit_bias", f"has the key {show(key)}; allowed: {allowed}")
        if token in found:
            raise invalid("logit_bias", f"names token {token} twice")
        if given.values[key] is None:
            raise given.wrong(key, "a number from -100 to 100")
        found[token] = given.number(key, -100, 100, 0)
    return tuple(sorted(found.items()))


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.values.get("stop")
    if value is None or value == []:
        return ()
    allowed = f"a string or 1 to 4 strings, each of 1 to {LONGEST_STOP} characters"
    stops = value if isinstance(value, list) else [value]
    if len(stops) > 4:
        raise fields.wrong("stop", allowed)
    for i, stop in enumerate(stops):
        if not isinstance(stop, str) or not 0 < len(stop) <= LONGEST_STOP:
            name = f"stop[{i}]" if isinstance(value, list) else "stop"
            raise invalid(name, f"is {show(stop)}; allowed: {allowed}")
    return tuple(stops)


def most_stop_ids(served: ServedModel) -> int:
    """How many stop ids a request may add to the model's own."""
    return MOST_STOP_IDS - len(served.stop_ids)


def _stop_ids(fields: Fields, served: ServedModel) -> tuple[int, ...]:
    own = () if fields.boolean("ignore_eos", False) else served.stop_ids
    asked = fields.array("stop_token_ids", most_stop_ids(served)) or []
    return tuple(sorted({*own, *token_ids(asked, "stop_token_ids", served.vocab_size)}))


def _stream_option(fields: Fields, stream: bool, wanted: str) -> bool:
    given = fields.object("stream_options")
    if given is None:
        return False
    if not stream:
        raise invalid("stream_options", "is only allowed when stream is true")
    for name, value in given.values.items():
        if name in STREAM_OPTIONS or value is None:
            continue
        raise unsupported(
            given.name(name) if len(name) < 64 else "stream_options",
            f"is {show(value)}, which is not supported; allowed in stream_options: "
            + ", ".join(STREAM_OPTIONS),
        )
    return given.boolean(wanted, False)


def _check_labels(fields: Fields) -> None:
    """Fields that only carry a client's own labels."""
    fields.string("user")
    fields.string("safety_identifier", longest=64)
    fields.string("prompt_cache_key", longest=1024)
    fields.boolean("prefix_cache", True)
    metadata: dict[str, Any] = getattr(fields.object("metadata"), "values", {})
    if len(metadata) > 16:
        raise fields.wrong("metadata", "an object of at most 16")
    for key, value in metadata.items():
        if len(key) > 64 or not isinstance(value, str) or len(value) > 512:
            raise invalid(
                "metadata",
                f"has {show(key)}: {show(value)}; allowed: keys of at most 64 and strings of at most 512 characters",
            )

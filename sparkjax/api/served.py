"""The model that is served, as the API sees it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkjax.engine.records import Limits
from sparkjax.pooling import Pooler
from sparkjax.text import thinking
from sparkjax.text.deepseek import DeepSeekEncoder
from sparkjax.text.hf_tokenizer import read_json, special_tokens
from sparkjax.text.parsing import Format, choose, format_named, sample
from sparkjax.text.template import ChatTemplate
from sparkjax.text.tokenizer import Tokenizer
from sparkjax.weights.checkpoint import GGUF
from sparkjax.weights.errors import CheckpointError

LONGEST_POOLED = 8192
"""Tokens of a text for /v1/embeddings."""


log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SamplingDefaults:
    """What a request that does not say otherwise samples with."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """The defaults in a checkpoint's generation_config.json; OpenAI's where it is silent.

    An explicit `"do_sample": false` means greedy, whatever the other values are.
    """
    known = {f.name: f.type for f in dataclasses.fields(SamplingDefaults)}
    given = {
        name: (int if name == "top_k" else float)(value)
        for name, value in generation_config.items()
        if name in known and isinstance(value, int | float) and not isinstance(value, bool)
    }
    if generation_config.get("do_sample") is False:
        given["temperature"] = 0.0
    given["top_k"] = max(int(given.get("top_k", 0)), 0)  # -1 also means all
    return SamplingDefaults(**given)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """One model.

    Attributes:
      id: the name that clients ask for; `aliases` are further ones.
      template: of conversations; None refuses chat requests.
      context: the most tokens of prompt and answer together.
      vocab_size: token ids run from 0 to one less.
      stop_ids: tokens that end an answer.
      defaults: of sampling.
      default_max_tokens: of a chat answer that names no limit; None is the rest of the context.
      created: Unix time, for the list of models.
      weight_problems: what the devices do not hold as it was read, in words; None where that is
        not known.
      model_type: of config.json.
      embed: a text's tokens as one vector, float32 [H], or None; up to `embed_tokens` of them.
      answer_format: a name of `sparkjax.text.parsing.FORMATS`; None is told from the template.
    """

    id: str
    tokenizer: Tokenizer
    template: ChatTemplate | DeepSeekEncoder | None
    context: int
    vocab_size: int
    stop_ids: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()
    defaults: SamplingDefaults = SamplingDefaults()
    default_max_tokens: int | None = None
    created: int = 0
    weight_problems: Callable[[], list[str]] | None = None
    model_type: str = ""
    answer_format: str | None = None
    embed: Callable[[Sequence[int]], Any] | None = None
    embed_tokens: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """All ids, the first one first."""
        return (self.id, *self.aliases)

    @functools.cached_property
    def format(self) -> Format:
        """How answers are written."""
        if self.answer_format is not None:
            return format_named(self.answer_format)
        if not isinstance(self.template, ChatTemplate):
            return choose(None, self.model_type)
        return choose(self.template.source + sample(self.template.render), self.model_type)

    @functools.cached_property
    def thinking(self) -> thinking.Thinking:
        """What the template understands of reasoning."""
        return thinking.probe(self.template) if self.template else thinking.Thinking()

    @functools.cached_property
    def template_names(self) -> frozenset[str]:
        """What `chat_template_kwargs` may set beside the switches that every API has."""
        return self.template.names if self.template else frozenset()


def served_model(model: Any, limits: Limits, config: Any) -> ServedModel:
    """What is served of a loaded model.

    Args:
      model: a `sparkjax.model.Model`.
      limits: of the engine.
      config: `sparkjax.settings.Config`.

    Raises:
      CheckpointError: it has no tokenizer, or its chat template is none.
      OSError: the file of `model.chat_template` cannot be read.
    """
    tokenizer: Tokenizer = model.tokenizer
    checkpoint = model.checkpoint
    model_type = str(checkpoint.config.get("model_type", ""))
    generation = {}
    if not isinstance(checkpoint, GGUF):
        generation = read_json(checkpoint.path / "generation_config.json")
    made = ServedModel(
        id=config.model.name,
        aliases=tuple(config.model.aliases),
        tokenizer=tokenizer,
        template=_template(checkpoint, config.model.chat_template)
        or DeepSeekEncoder.of(model_type),
        context=limits.context,
        vocab_size=model.config.vocab,
        stop_ids=tuple(sorted({*tokenizer.eos_ids, *model.config.eos})),
        defaults=sampling_defaults(generation),
        default_max_tokens=config.engine.default_max_tokens,
        created=int(time.time()),
        weight_problems=model.weight_problems if model.digests is not None else None,
        model_type=model_type,
        answer_format=config.model.answer_format,
        **_pooling(model, limits, config.model.pooling),
    )
    # Told from the template once, and not while a first client waits.
    log.info("answers in the format %s, reasoning %s", made.format.name, _words(made))
    return made


def _words(served: ServedModel) -> str:
    thinking = served.thinking
    if not thinking.available:
        return "none"
    known = ", ".join(sorted({str(word) for word in thinking.efforts.values()}))
    switch = f"switched by {thinking.switch}" if thinking.switch else "always on"
    extra = ", ".join(sorted(served.template_names))
    return "; ".join(
        filter(None, (switch, known and f"efforts {known}", extra and f"also reads {extra}"))
    )


def _pooling(model: Any, limits: Limits, pooling: str) -> dict[str, Any]:
    """`embed` and its limit, compiled and ready."""
    if pooling == "off":
        return {}
    if model.context.transport is not None:
        raise CheckpointError("model.pooling is not off; allowed with one process only")
    pooler = Pooler(model, min(limits.context, LONGEST_POOLED))
    embed = functools.partial(pooler.embed, pooling=pooling)
    embed((0,))
    return {"embed": embed, "embed_tokens": pooler.room}


def _template(checkpoint: Any, override: str | None) -> ChatTemplate | None:
    """The checkpoint's own template, or the one of a file with the checkpoint's special tokens."""
    source = Path(override).read_text(encoding="utf-8") if override is not None else None
    if isinstance(checkpoint, GGUF):
        metadata = dict(checkpoint.file.metadata)
        if source is not None:
            metadata.pop("tokenizer.chat_template.tool_use", None)
            metadata["tokenizer.chat_template"] = source
        return ChatTemplate.from_gguf(metadata, override or str(checkpoint.path))
    if source is None:
        return ChatTemplate.from_dir(checkpoint.path)
    tokens = special_tokens(read_json(checkpoint.path / "tokenizer_config.json"))
    return ChatTemplate(source, tokens, name=str(override))

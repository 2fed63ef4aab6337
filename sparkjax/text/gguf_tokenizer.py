"""The tokenizer in the metadata of a GGUF file.

Models `gpt2` (byte-level BPE) and `llama` (sentencepiece BPE, e.g. Gemma). Keys and token types:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models

from sparkjax.text import sentencepiece_model as sp
from sparkjax.text.encoders import FastEncoder, PieceEncoder
from sparkjax.text.pretokenizers import RULES
from sparkjax.text.tokenizer import Tokenizer
from sparkjax.text.vocabulary import Vocabulary, is_markup
from sparkjax.weights.errors import CheckpointError

# Ends of a turn that llama.cpp also looks up by name, because files do not always list them.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")


def tokenizer_from_gguf(metadata: Mapping[str, Any], name: str = "GGUF") -> Tokenizer:
    """Builds the tokenizer.

    Args:
      metadata: of a GGUFFile.
      name: of the file, for errors.

    Raises:
      CheckpointError: a missing or inconsistent key, or a tokenizer that is not implemented.
    """
    fields = _Fields(metadata, name)
    model = fields.get("model", str)
    if model not in _MODELS:
        raise fields.error("model", f"is {model!r}; allowed: {', '.join(_MODELS)}")
    tokens, kinds = fields.tokens()
    special = {i for i, kind in enumerate(kinds) if kind in (sp.CONTROL, sp.UNKNOWN)}
    added = special | {i for i, kind in enumerate(kinds) if kind == sp.USER_DEFINED}
    control = {i for i, kind in enumerate(kinds) if kind == sp.CONTROL}
    control |= {i for i in added if is_markup(tokens[i])}
    encoder, layout, add_bos = _MODELS[model](fields, tokens, kinds, control)
    bos = fields.token("bos")
    eos = [i for key in ("eos", "eot", "eom") if (i := fields.token(key)) is not None]
    eos += [i for i in control if tokens[i] in _TURN_ENDS]
    literal = added if model == "gpt2" else special
    vocabulary = Vocabulary(
        tuple(tokens),
        literal=frozenset(literal),
        special=frozenset(special),
        control=frozenset(control),
        **layout,
    )
    return Tokenizer(
        vocabulary,
        encoder,
        bos_id=bos,
        eos_ids=eos,
        add_bos=fields.get("add_bos_token", bool, add_bos),
    )


class _Fields:
    """The `tokenizer.ggml.*` keys with typed access."""

    def __init__(self, metadata: Mapping[str, Any], name: str):
        self.metadata, self.name = metadata, name

    def error(self, key: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.name}: tokenizer.ggml.{key} {message}")

    def get(self, key: str, kind: type, default: Any = ...) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if value is ...:
            raise self.error(key, "is missing")
        if value is not default and not isinstance(value, kind):
            raise self.error(key, f"is a {type(value).__name__}; allowed: {kind.__name__}")
        return value

    def column(self, key: str, count: int) -> list | None:
        values = self.metadata.get(f"tokenizer.ggml.{key}")
        if values is None:
            return None
        if not isinstance(values, np.ndarray):
            raise self.error(key, f"is a {type(values).__name__}; allowed: an array of numbers")
        if len(values) != count:
            raise self.error(key, f"has {len(values)} entries, but there are {count} tokens")
        return values.tolist()

    def strings(self, key: str) -> list[str]:
        values = self.get(key, list)
        if not all(isinstance(value, str) for value in values):
            raise self.error(key, "holds arrays; allowed: strings")
        return values

    def tokens(self) -> tuple[list[str], list[int]]:
        tokens = self.strings("tokens")
        kinds = self.column("token_type", len(tokens)) or [sp.NORMAL] * len(tokens)
        if len(set(tokens)) != len(tokens):
            twice = Counter(tokens).most_common(1)[0][0]
            raise self.error("tokens", f"holds {twice!r} twice")
        if wrong := set(kinds) - set(range(sp.NORMAL, sp.BYTE + 1)):
            raise self.error("token_type", f"holds {min(wrong)}; allowed: 1 to 6")
        return tokens, kinds

    def token(self, key: str) -> int | None:
        value = self.get(f"{key}_token_id", int, None)
        count = len(self.metadata["tokenizer.ggml.tokens"])
        if value is not None and not 0 <= value < count:
            raise self.error(f"{key}_token_id", f"is {value}, but there are {count} tokens")
        return value


def _gpt2(fields: _Fields, tokens: list[str], kinds: list[int], control: set[int]):
    pre = fields.get("pre", str, "default")
    if pre not in RULES:
        raise fields.error("pre", f"is {pre!r}; allowed: {', '.join(RULES)}")
    rule = RULES[pre]
    # A merge is "left right"; a piece never starts with a plain space, but may contain one.
    cuts = [(m, m.find(" ", 1)) for m in fields.strings("merges")]
    try:
        model = models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [(m[:cut], m[cut + 1 :]) for m, cut in cuts],
            ignore_merges=rule.whole_words,
        )
    except Exception as error:  # `tokenizers` raises bare Exceptions
        raise fields.error("merges", f"do not fit the tokens: {error}") from None
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = rule.cut()
    if normalizer := rule.normalizer():
        built.normalizer = normalizer
    built.add_special_tokens([_added(tokens[i]) for i in sorted(control)])
    user = [i for i, kind in enumerate(kinds) if kind == sp.USER_DEFINED and i not in control]
    built.add_tokens([_added(tokens[i]) for i in user])
    return FastEncoder(built), {"byte_level": True}, rule.add_bos


def _added(spelling: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(spelling, normalized=False)


def _llama(fields: _Fields, tokens: list[str], kinds: list[int], control: set[int]):
    scores = fields.column("scores", len(tokens))
    if scores is None:
        raise fields.error("scores", "is missing")
    prefix = fields.get("add_space_prefix", bool, True)
    kinds = [sp.CONTROL if i in control else kind for i, kind in enumerate(kinds)]
    proto = sp.model_proto(
        zip(tokens, scores, kinds, strict=True),
        byte_fallback=sp.BYTE in kinds,
        add_space_prefix=prefix,
        remove_extra_whitespaces=fields.get("remove_extra_whitespaces", bool, False),
    )
    try:
        encoder = PieceEncoder(proto)
    except RuntimeError as error:
        raise fields.error("tokens", f"are no sentencepiece vocabulary: {error}") from None
    return encoder, {"byte_level": False, "strip_first_space": prefix}, True


_MODELS: dict[str, Callable] = {"gpt2": _gpt2, "llama": _llama}

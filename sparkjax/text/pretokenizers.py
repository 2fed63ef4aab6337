"""How byte-level BPE vocabularies of GGUF files cut a text into words.

A GGUF file only names the rule (`tokenizer.ggml.pre`). The rules are those of the models' own
tokenizer.json, or llama.cpp's (`src/llama-vocab.cpp`) where there is no such file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
# Marks belong to words here.
_QWEN35_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Rule(NamedTuple):
    """One way of cutting words.

    Attributes:
      cut: makes the pre-tokenizer.
      nfc: whether the text is brought to Unicode NFC first.
      whole_words: a word that is a token is taken without trying merges.
      add_bos: whether a prompt starts with the BOS token if the file does not say.
    """

    cut: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """The normalizer, if there is any."""
        return normalizers.NFC() if self.nfc else None


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """Cuts by each pattern in turn; what a pattern does not match stays one piece."""

    def make() -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, to_bytes])

    return make


_QWEN2 = Rule(_split(_QWEN2_PATTERN), nfc=True)
_LLAMA3 = Rule(_split(_LLAMA3_PATTERN), whole_words=True, add_bos=True)

RULES: dict[str, Rule] = {
    "gpt-2": Rule(_gpt2),
    "smollm": Rule(_digits_then_gpt2),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": Rule(_split(_QWEN35_PATTERN), nfc=True),
    # For files that name none: llama.cpp's own mixture.
    "default": Rule(_split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]")),
}

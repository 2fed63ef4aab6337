"""What each token id stands for: its bytes, its spelling, and whether it is a control token."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# Added tokens that tokenizers do not always flag as special, though templates and parsers treat
# them as markup: `<|...|>` of any name, and the tags of reasoning and tool calls.
_MARKUP = re.compile(
    r"<\|.*\|>|<｜.*｜>|｜DSML｜|"
    r"</?(think|tool_call|tool_response|tool_calls|tools|arg_key|arg_value)>",
    re.DOTALL,
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def is_markup(spelling: str) -> bool:
    """Whether an added token is markup by its spelling, whatever its flags say."""
    return bool(_MARKUP.fullmatch(spelling))


def byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: character to byte.

    Printable Latin-1 stands for itself; the other 68 bytes follow from U+0100 on. (OpenAI gpt-2,
    `encoder.py`, bytes_to_unicode.)
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = byte_characters()


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of one tokenizer.

    Attributes:
      tokens: spelling of every id as the file has it; None where an id is unused.
      byte_level: True where spellings are GPT-2's byte characters; False for sentencepiece
        spellings (U+2581 is a space, `<0x0A>` is a byte).
      literal: ids whose spelling is the text itself (added tokens).
      special: ids that are no text: skipped when decoding with skip_special.
      control: ids that only a template may write (the special ones, and markup).
      strip_first_space: the first space of a decoded text is the tokenizer's, not the text's.
    """

    tokens: tuple[str | None, ...]
    byte_level: bool
    literal: frozenset[int] = frozenset()
    special: frozenset[int] = frozenset()
    control: frozenset[int] = frozenset()
    strip_first_space: bool = False
    _cache: dict[int, bytes] = field(default_factory=dict, repr=False, compare=False)

    def bytes_of(self, token: int) -> bytes:
        """The exact bytes of a token; none for an id past the end (a padded embedding has such).

        Raises:
          IndexError: a negative id.
        """
        found = self._cache.get(token)
        if found is None:
            found = self._cache[token] = self._bytes(token)
        return found

    def _bytes(self, token: int) -> bytes:
        if token < 0:
            raise IndexError(f"token id {token} is negative")
        spelling = self.tokens[token] if token < len(self.tokens) else None
        if spelling is None:
            return b""
        if token in self.literal:
            return spelling.encode()
        if self.byte_level:
            try:
                return bytes([_BYTE_OF[c] for c in spelling])
            except KeyError:  # not in byte characters after all: as it is, like `tokenizers`
                return spelling.encode()
        if match := _BYTE_TOKEN.fullmatch(spelling):
            return bytes([int(match[1], 16)])
        return spelling.replace("\u2581", " ").encode()

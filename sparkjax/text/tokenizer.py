"""Text to token ids and back, whatever file the tokenizer came from.

Two ways in. `encode` takes a user's words: a control token spelled in them is just those letters,
so nobody can close a turn or open a system message. `encode_rendered` takes what a chat template
wrote, where control tokens are control tokens. User text inside a template is protected by
`shield`, which marks control spellings so that `encode_rendered` reads them as letters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from sparkjax.text.characters import valid
from sparkjax.text.encoders import Encoder
from sparkjax.text.vocabulary import Vocabulary

# A Unicode noncharacter ("never for interchange"): breaks a spelling, and is removed again.
SHIELD = "\ufdd0"


class Tokenizer:
    """A tokenizer. Use `from_gguf` or `from_dir`.

    Attributes:
      vocab_size: number of ids; an embedding table may have more rows.
      bos_id: the token in front of a prompt, or None.
      eos_ids: tokens that end an answer, rising.
      add_bos: whether a raw prompt starts with bos_id. (Chat templates write it themselves.)
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encoder: Encoder,
        *,
        bos_id: int | None,
        eos_ids: Iterable[int],
        add_bos: bool,
        swallow: Mapping[int, tuple[bool, bool]] | None = None,
    ):
        """Puts the parts together.

        Args:
          swallow: control tokens that take the white space (before, after) them with them.
        """
        self.vocabulary = vocabulary
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = bos_id
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.add_bos = add_bos and bos_id is not None
        self._encoder = encoder
        self._control_ids = {t: i for i in vocabulary.control if (t := vocabulary.tokens[i])}
        self._control = _pattern(self._control_ids, {})
        self._markup = _pattern(self._control_ids, swallow or {})

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], name: str = "GGUF") -> Tokenizer:
        """The tokenizer in the metadata of a GGUF file. See sparkjax.text.gguf_tokenizer."""
        from sparkjax.text.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(metadata, name)

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face checkpoint folder. See sparkjax.text.hf_tokenizer."""
        from sparkjax.text.hf_tokenizer import tokenizer_from_dir

        return tokenizer_from_dir(Path(path))

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text, without BOS.

        Args:
          special: False reads control spellings as ordinary text; True is `encode_rendered`.
        """
        if special:
            return self.encode_rendered(text)
        text = valid(text)
        return self._encoder.encode(text, True) if text else []

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered prompt: control spellings are control tokens, unless shielded."""
        text, ids, at = valid(text), [], 0
        for match in self._markup.finditer(text):
            ids += self._ordinary(text[at : match.start()], at == 0)
            found = match[0] if match[0] in self._control_ids else match[0].strip()
            ids.append(self._control_ids[found])
            at = match.end()
        return ids + self._ordinary(text[at:], at == 0)

    def _ordinary(self, text: str, first: bool) -> list[int]:
        text = text.replace(SHIELD, "")
        return self._encoder.encode(text, first) if text else []

    def shield(self, text: str, keep: Collection[str] = ()) -> str:
        """Marks control spellings in user text for `encode_rendered`; other text stays as it is.

        Args:
          keep: spellings that stay control tokens.
        """
        text = text.replace(SHIELD, "")
        return self._control.sub(
            lambda m: m[0] if m[0] in keep else m[0][0] + SHIELD + m[0][1:], text
        )

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of token ids. Invalid UTF-8 becomes U+FFFD (maximal subparts, as in Unicode)."""
        vocabulary, special = self.vocabulary, self.vocabulary.special
        kept = (i for i in ids if not (skip_special and i in special))
        raw = b"".join(map(vocabulary.bytes_of, kept))
        if vocabulary.strip_first_space and raw.startswith(b" "):
            raw = raw[1:]
        return raw.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes of one token: the concatenation over a text is the text."""
        return self.vocabulary.bytes_of(token)

    def token_text(self, token: int) -> str:
        r"""A printable, reversible name of one token.

        The text if its bytes are valid UTF-8, else `bytes:\xe2\x80` as OpenAI writes it, so that
        two parts of characters never look alike.
        """
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def token_id(self, spelling: str) -> int | None:
        """The id of a control token by its name, e.g. "<think>"; None if there is none."""
        return self._control_ids.get(spelling)

    def is_special(self, token: int) -> bool:
        """Whether a token is no text: it is left out by decode(skip_special=True)."""
        return token in self.vocabulary.special


def _pattern(ids: Mapping[str, int], swallow: Mapping[int, tuple[bool, bool]]) -> re.Pattern[str]:
    """Matches any of the spellings, the longest first: a token wins over one that it starts with."""
    parts = []
    for spelling in sorted(ids, key=len, reverse=True):
        before, after = swallow.get(ids[spelling], (False, False))
        parts.append(r"\s*" * before + re.escape(spelling) + r"\s*" * after)
    # A token of one character cannot be broken from inside: the mark behind it says no.
    return re.compile(f"(?:{'|'.join(parts)})(?!{SHIELD})" if parts else r"(?!)")

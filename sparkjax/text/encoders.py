"""Plain text to token ids, without control tokens: by `tokenizers` or by `sentencepiece`."""

from __future__ import annotations

from typing import Protocol

import sentencepiece
import tokenizers


class Encoder(Protocol):
    """Encodes text in which no control token is recognised."""

    def encode(self, text: str, first: bool) -> list[int]:
        """Token ids of `text`; `first` says that it starts a prompt.

        Some vocabularies put a space in front of a text, but not in front of what follows a
        control token.
        """
        ...


class FastEncoder:
    """An Encoder over `tokenizers`.

    Args:
      first: encodes the start of a prompt. Its control tokens must be special added tokens.
      rest: encodes what follows a control token; None if that makes no difference.
    """

    def __init__(self, first: tokenizers.Tokenizer, rest: tokenizers.Tokenizer | None = None):
        self._first, self._rest = first, rest or first
        for each in (self._first, self._rest):
            each.no_truncation()
            each.no_padding()
            # Special tokens are then encoded like any other text.
            each.encode_special_tokens = True

    def encode(self, text: str, first: bool) -> list[int]:
        """See Encoder."""
        chosen = self._first if first else self._rest
        # The "fast" call does not track character offsets; it exists for batches only.
        return chosen.encode_batch_fast([text], add_special_tokens=False)[0].ids


class PieceEncoder:
    """An Encoder over `sentencepiece`, which never makes a CONTROL piece from text.

    Args:
      model: a serialized sentencepiece ModelProto.
    """

    def __init__(self, model: bytes):
        self._first = sentencepiece.SentencePieceProcessor(model_proto=model)
        # Protobuf merges repeated messages: this appends normalizer_spec.add_dummy_prefix = false.
        rest = model + b"\x1a\x02\x18\x00"
        self._rest = sentencepiece.SentencePieceProcessor(model_proto=rest)

    def encode(self, text: str, first: bool) -> list[int]:
        """See Encoder."""
        return (self._first if first else self._rest).encode(text, out_type=int)

"""Token ids to text as they come."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable

from sparkjax.text.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns a stream of token ids into text deltas; one per stream.

    Whatever the chunks, the deltas and the final flush together equal `tokenizer.decode` of all
    ids. A character whose bytes are not all there yet is held; U+FFFD stands only for bytes that
    no continuation can make valid, or that the stream ended on. The work is constant per token:
    nothing is decoded twice.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, keep: Collection[int] = ()):
        """Starts a stream.

        Args:
          keep: special tokens that are text all the same.
        """
        self._vocabulary = tokenizer.vocabulary
        self._skipped = self._vocabulary.special - {*keep} if skip_special else frozenset()
        self._utf8 = _Utf8("replace")
        self._at_start = self._vocabulary.strip_first_space

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with these ids."""
        bytes_of, skipped = self._vocabulary.bytes_of, self._skipped
        raw = b"".join([bytes_of(i) for i in ids if i not in skipped])
        if self._at_start and raw:
            self._at_start = False
            raw = raw.removeprefix(b" ")
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """The rest at the end of the stream: held bytes as U+FFFD. Ready for a new stream then."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._at_start = self._vocabulary.strip_first_space
        return rest

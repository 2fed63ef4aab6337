"""A sentencepiece model from the vocabulary of a GGUF file.

GGUF files of the `llama` tokenizer hold the pieces, scores and types of a sentencepiece BPE model.
Written back as the ModelProto that `sentencepiece` reads, its own code encodes, exactly.
(Field numbers: https://github.com/google/sentencepiece, src/sentencepiece_model.proto.)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_BPE = 2


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _message(number: int, body: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def model_proto(
    pieces: Iterable[tuple[str, float, int]],
    *,
    byte_fallback: bool,
    add_space_prefix: bool,
    remove_extra_whitespaces: bool,
) -> bytes:
    """A serialized ModelProto of a BPE model without text normalisation.

    Args:
      pieces: (piece, score, type) in the order of ids; types as in sentencepiece and GGUF.
      byte_fallback: unknown characters become byte pieces (all 256 must be there).
      add_space_prefix: a space is put in front of a text.
      remove_extra_whitespaces: leading, trailing and repeated spaces are dropped.
    """
    out = [
        _message(1, _message(1, piece.encode()) + _float(2, score) + _number(3, kind))
        for piece, score, kind in pieces
    ]
    trainer = _number(3, _BPE) + _number(35, byte_fallback)
    normalizer = (
        _message(1, b"identity")
        + _number(3, add_space_prefix)
        + _number(4, remove_extra_whitespaces)
        + _number(5, True)  # spaces are written as U+2581
    )
    return b"".join([*out, _message(2, trainer), _message(3, normalizer)])


def with_control(model: bytes, ids: set[int]) -> bytes:
    """A serialized ModelProto in which these pieces have type CONTROL: text never makes them.

    Raises:
      ValueError: not a ModelProto.
    """
    out, at, index = [], 0, 0
    while at < len(model):
        start = at
        tag, at = _read_varint(model, at)
        if tag & 7 != 2:
            raise ValueError(f"not a sentencepiece model: field {tag >> 3} at byte {start}")
        length, at = _read_varint(model, at)
        body, at = model[at : at + length], at + length
        if tag >> 3 == 1:
            # The last value of a field counts.
            body += _number(3, CONTROL) if index in ids else b""
            index += 1
        out.append(_message(tag >> 3, body))
    return b"".join(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("not a sentencepiece model: it ends inside a number")

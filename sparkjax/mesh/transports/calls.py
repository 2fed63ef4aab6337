"""The collectives of a transport whose native half is one XLA FFI target: calls in a program."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

ALL_REDUCE, ALL_GATHER, ALL_TO_ALL, BROADCAST, BARRIER = range(5)
"""Kinds of calls, as in calls.h."""
MESSAGE = 512
"""Bytes of the longest message of a native half."""


@dataclasses.dataclass(frozen=True)
class Calls:
    """`Transport` for a handle of a native library that has functions PREFIX_abort, _patience,
    _why and _close, and the FFI target PREFIX; `platform` is where the programs run."""

    PREFIX: ClassVar[str]
    rank: int
    ranks: int
    handle: int
    platform: str = "cpu"

    def all_reduce(self, x: jax.Array) -> jax.Array:
        if x.dtype in (jnp.float32, jnp.bfloat16):
            return self._call(ALL_REDUCE, x, x.shape)
        return self._call(ALL_REDUCE, x.astype(jnp.float32), x.shape).astype(x.dtype)

    def all_gather(self, x: jax.Array) -> jax.Array:
        return self._call(ALL_GATHER, x, (self.ranks, *x.shape))

    def all_to_all(self, x: jax.Array) -> jax.Array:
        if x.shape[:1] != (self.ranks,):
            raise ValueError(
                f"all_to_all: x is {x.shape}; its first axis must be {self.ranks} ranks"
            )
        return self._call(ALL_TO_ALL, x, x.shape)

    def broadcast(self, x: jax.Array, root: int = 0) -> jax.Array:
        return self._call(BROADCAST, x, x.shape, root)

    def barrier(self, after: jax.Array) -> jax.Array:
        return self._call(BARRIER, after, after.shape)

    def abort(self, reason: str) -> None:
        self._native("abort")(self.handle, reason.encode()[:399])

    def patience(self, seconds: float) -> None:
        """How long a collective waits for another rank from now on."""
        self._native("patience")(self.handle, ctypes.c_double(seconds))

    @property
    def failure(self) -> str:
        message = ctypes.create_string_buffer(MESSAGE)
        self._native("why")(self.handle, message, ctypes.c_uint64(len(message)))
        return message.value.decode(errors="replace")

    def close(self) -> None:
        self._native("close")(self.handle)

    def _library(self) -> ctypes.CDLL:
        """The native half, its target registered."""
        raise NotImplementedError

    def _native(self, name: str):
        return getattr(self._library(), f"{self.PREFIX}_{name}")

    def _call(self, kind: int, x: jax.Array, shape: tuple[int, ...], root: int = 0) -> jax.Array:
        self._library()
        # It has an effect, so that no rank's compiler drops or merges a call that others make.
        call = jax.ffi.ffi_call(
            self.PREFIX, jax.ShapeDtypeStruct(shape, x.dtype), has_side_effect=True
        )
        return call(x, world=np.int64(self.handle), kind=np.int64(kind), root=np.int64(root))

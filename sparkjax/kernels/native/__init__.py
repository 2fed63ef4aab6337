"""The C++ kernels for a CPU: loading the library and registering its XLA FFI targets.

Nothing is built or loaded at import. The library is built when the package is installed, or by
`python -m sparkjax.kernels.native.build` in a checkout.
"""

from __future__ import annotations

import ctypes
import functools

import jax

TARGETS = (
    "sparkjax_linear",
    "sparkjax_embed",
    "sparkjax_paged_attention",
    "sparkjax_paged_write",
)


@functools.cache
def why_not() -> str | None:
    """None if the native kernels can be called, else the reason. Loads them on the first call."""
    from . import build  # here, so that `python -m` runs it once

    try:
        path = build.library()
    except build.BuildError as error:
        return str(error)
    if not path.is_file():
        how = "python -m sparkjax.kernels.native.build"
        other = "another build is there" if any(build.HERE.glob("*.so")) else "nothing is built"
        return f"no library for this machine, jaxlib and these sources ({other}); run {how}"
    try:
        library = ctypes.CDLL(str(path))
        for name in TARGETS:
            handler = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
    except Exception as error:  # a library that does not load is a reason, never a crash
        return f"{path.name} does not load: {error}"
    return None


def available() -> bool:
    """Whether the native kernels can be called."""
    return why_not() is None


def require() -> None:
    """Raises RuntimeError with the reason where the native kernels cannot be called."""
    reason = why_not()
    if reason is not None:
        raise RuntimeError(f"native kernels: {reason}")

"""Compiling the transports' C++ where it runs, on first use: two seconds, then it is kept.

The library lies beside its source where that can be written, else in the user's cache directory.
Its name carries a digest of the sources, the flags and jaxlib's XLA FFI version.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import jax

from . import TransportError

HERE = Path(__file__).resolve().parent
FLAGS = ("-O3", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-w")


class BuildError(RuntimeError):
    """A transport cannot be compiled here; the message is the compiler's, or what is missing."""


def nvcc(architecture: str, *flags: str) -> tuple[str, ...]:
    """The command line that compiles a CUDA half for "sm_121a", say."""
    shared = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC")
    return ("nvcc", *shared, f"-arch={architecture}", *flags)


def load(
    name: str,
    source: str,
    headers: tuple[str, ...],
    platform: str,
    flags: tuple[str, ...] = (),
    mode: int = ctypes.DEFAULT_MODE,
) -> ctypes.CDLL:
    """A transport's native half, its FFI target sparkjax_NAME registered.

    Args:
      source: SOURCE.cc beside this module is for "cpu", SOURCE.cu for "cuda".
      headers: of both.
      flags: of all compilers.
      mode: how the library is opened.

    Raises:
      TransportError: it does not compile.
    """
    try:
        if platform == "cuda":
            version = jax.local_devices()[0].compute_capability.replace(".", "")
            commands: tuple[tuple[str, ...], ...] = (nvcc(f"sm_{version}", *flags),)
            path = library(f"{name}_cuda", (f"{source}.cu", *headers), commands)
        else:
            commands = tuple((c, *FLAGS, *flags) for c in ("g++", "c++", "clang++"))
            path = library(name, (f"{source}.cc", *headers), commands)
    except BuildError as error:
        raise TransportError(str(error)) from error
    native = ctypes.CDLL(str(path), mode=mode)
    target = f"sparkjax_{name}"
    handler = jax.ffi.pycapsule(getattr(native, target))
    jax.ffi.register_ffi_target(target, handler, platform=platform.replace("cuda", "CUDA"))
    return native


def library(name: str, sources: tuple[str, ...], compilers: tuple[tuple[str, ...], ...]) -> Path:
    """The library of these sources, compiled unless it is there.

    Args:
      sources: file names beside this module; the first is compiled, the others are its headers.
      compilers: command lines that may be tried, without flags that all share.

    Raises:
      BuildError: no compiler runs, or the sources do not compile.
    """
    include = Path(jax.ffi.include_dir())
    state = hashlib.sha256(repr((FLAGS, compilers)).encode())
    for path in [*(HERE / s for s in sources), include / "xla" / "ffi" / "api" / "c_api.h"]:
        state.update(path.read_bytes())
    file = f"libsparkjax_{name}-{state.hexdigest()[:16]}.so"
    folders = [HERE, Path("~/.cache/sparkjax/native").expanduser()]
    for folder in folders:
        if (folder / file).is_file():
            return folder / file
    writable = [folder for folder in folders if _writable(folder)]
    if not writable:
        raise BuildError(f"neither {folders[0]} nor {folders[1]} can be written")
    folder = writable[0]
    reasons = []
    for compiler in compilers:
        handle, partial = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            command = [*compiler, f"-I{include}", str(HERE / sources[0]), "-o", partial]
            command += ["-lrt", "-ldl", "-lpthread"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode:
                Path(partial).chmod(0o755)
                Path(partial).replace(folder / file)
                return folder / file
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            reasons.append(f"{compiler[0]}: {(errors or ['failed'])[0]}")
        except OSError as error:
            reasons.append(f"{compiler[0]}: {error.strerror}")
        finally:
            Path(partial).unlink(missing_ok=True)
    raise BuildError(f"transport {name} does not compile: {'; '.join(reasons)}")


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return os.access(folder, os.W_OK)

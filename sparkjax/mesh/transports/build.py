"""Compiling the transports' C++ where it runs, on first use: two seconds, then it is kept.

The library lies beside its source where that can be written, else in the user's cache directory.
Its name carries a digest of the sources, the flags and jaxlib's XLA FFI version.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import jax

HERE = Path(__file__).resolve().parent
FLAGS = ("-O3", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-w")


class BuildError(RuntimeError):
    """A transport cannot be compiled here; the message is the compiler's, or what is missing."""


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

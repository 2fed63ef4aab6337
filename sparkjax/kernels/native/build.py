"""Compiling and locating the native library: `python -m sparkjax.kernels.native.build`.

Needs nothing but the standard library, so that setup.py can load this file on its own. The library
is compiled on the machine that runs it, with -march=native, and its name carries a digest of the
sources, the flags, the XLA FFI version of jaxlib's headers and this machine's vector instructions:
a library that does not fit is not found. (The digest has the FFI version and not jaxlib's, because
that version is what XLA checks at registration; a package may be built beside another jaxlib than
it runs with.)

-ffp-contract=off: the sources fuse a multiply and an add by explicit instructions. Left to the
compiler, one instance of a template could be fused where another is not, and a row's bits would
depend on the batch it is in.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("ffi.cc",)
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-w")
LIBRARIES = ("-pthread",)


class BuildError(RuntimeError):
    """The library cannot be compiled here."""


def include_dir() -> Path:
    """jaxlib's headers, found without importing jax. Raises BuildError."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("jaxlib is not installed; its headers are needed")
    path = Path(spec.submodule_search_locations[0]) / "include"
    if not (path / "xla" / "ffi" / "api" / "ffi.h").is_file():
        raise BuildError(f"jaxlib has no XLA FFI headers in {path}")
    return path


def ffi_version(include: Path) -> str:
    """ "major.minor" of the XLA FFI that the headers describe."""
    text = (include / "xla" / "ffi" / "api" / "c_api.h").read_text(encoding="utf-8")
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    return ".".join(m.group(1) if m else "?" for m in found)


def machine() -> str:
    """What -march=native depends on, as far as /proc/cpuinfo tells it."""
    words = [platform.system(), platform.machine()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return " ".join([*words, platform.processor()])
    flags: set[str] = set()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags.update(value.split())
        elif key.strip() in ("cpu family", "model", "CPU implementer", "CPU part"):
            words.append(f"{key.strip()}={value.strip()}")
    vector = re.compile(r"sse|ssse|avx|fma|f16c|bmi|amx|gfni|asimd|fphp|sve|sme|i8mm|bf16")
    return " ".join([*sorted(set(words)), *sorted(f for f in flags if vector.match(f))])


def digest() -> str:
    """Of everything that the library's bits depend on. Raises BuildError."""
    state = hashlib.sha256()
    for part in (ffi_version(include_dir()), machine(), " ".join(FLAGS)):
        state.update(part.encode() + b"\0")
    for path in sorted([*HERE.glob("*.cc"), *HERE.glob("*.h")]):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()[:16]


def library(directory: Path | None = None) -> Path:
    """Where the library that fits this machine and these sources is, or would be."""
    return (directory or HERE) / f"libsparkjax_native-{digest()}.so"


def compile(directory: Path | None = None, compiler: str | None = None) -> Path:
    """Compiles the library into `directory` (beside the sources) unless it is there.

    Args:
      compiler: the C++ compiler; left out, the first of g++, c++ and clang++ that runs.

    Raises:
      BuildError: no compiler, no headers, or the compiler's own message.
    """
    target = library(directory)
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    include = include_dir()
    sources = [str(HERE / name) for name in SOURCES]
    # Compiled under another name and moved: a process that loads it never sees half a file.
    handle, partial = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        for name in [compiler] if compiler else ["g++", "c++", "clang++"]:
            command = [*name.split(), *FLAGS, f"-I{include}", *sources, "-o", partial, *LIBRARIES]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except OSError:
                continue
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line]
                raise BuildError(f"{name}: {(lines or done.stderr.splitlines() or ['failed'])[0]}")
            Path(partial).chmod(0o755)
            Path(partial).replace(target)
            return target
    finally:
        Path(partial).unlink(missing_ok=True)
    raise BuildError(f"no C++ compiler ({compiler or 'g++, c++, clang++'})")


def main() -> int:
    """Builds beside the sources and prints where; 1 with a reason if that fails."""
    try:
        path = compile(compiler=os.environ.get("CXX"))
    except BuildError as error:
        print(f"native kernels: not built: {error}", file=sys.stderr)
        return 1
    for old in HERE.glob("libsparkjax_native-*.so"):
        if old != path:
            old.unlink()
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

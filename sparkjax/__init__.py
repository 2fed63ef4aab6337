"""sparkjax: large language models on NVIDIA DGX Spark, served and studied from pure JAX."""

from __future__ import annotations

import typing

from .arithmetic import settle_arithmetic
from .driver import settle_platform

__version__ = "0.1.0"

if typing.TYPE_CHECKING:
    from .model import Model

__all__ = ["Model", "__version__", "load"]

settle_platform()
settle_arithmetic()


def load(path: str, dtype: str | None = None, ranks: int = 1) -> Model:
    """Loads a checkpoint directory, a .gguf file, or `package:NAME/FILE`; see `Model.load`."""
    from .config import locate
    from .model import Model

    return Model.load(locate(path), dtype=dtype, ranks=ranks)


def __getattr__(name: str) -> typing.Any:
    # `sparkjax.Model` without importing jax for those who only want the version or the CLI.
    if name == "Model":
        from .model import Model

        return Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

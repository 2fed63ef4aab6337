"""Building the native library: what its name holds, and that a failure is a reason, not a crash."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest

from sparkjax.kernels.native import build


def test_headers_are_those_that_jax_names():
    assert str(build.include_dir()) == jax.ffi.include_dir()
    major, minor = build.ffi_version(build.include_dir()).split(".")
    assert major.isdigit() and minor.isdigit()


def test_a_changed_source_has_another_name(tmp_path, monkeypatch):
    before = build.library().name
    for path in [*build.HERE.glob("*.h"), *build.HERE.glob("*.cc")]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "HERE", tmp_path)
    assert build.library(tmp_path).name == before
    (tmp_path / "vec.h").write_text("// changed\n")
    assert build.library(tmp_path).name != before


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_a_failed_build_leaves_nothing(tmp_path, compiler):
    with pytest.raises(build.BuildError, match=compiler):
        build.compile(tmp_path, compiler)
    assert not list(tmp_path.iterdir())


def test_builds_without_the_package():
    """As setup.py uses it: the file alone, with nothing of sparkjax imported."""
    code = (
        "import runpy, sys; m = runpy.run_path(sys.argv[1]); print(m['library']().name);"
        "assert 'sparkjax' not in sys.modules and 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, build.__file__], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == build.library().name

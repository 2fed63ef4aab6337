"""Builds the native CPU kernels while the package is installed; everything else is pyproject.toml.

Without a compiler the package installs all the same and says so.
"""

import importlib.util
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGE = Path("sparkjax", "kernels", "native")


def load_build():
    """sparkjax/kernels/native/build.py on its own: the package's dependencies are not here."""
    path = Path(__file__).resolve().parent / PACKAGE / "build.py"
    spec = importlib.util.spec_from_file_location("sparkjax_native_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildNative(build_ext):
    """Replaces the compilation of extension modules by that of the one library."""

    built = None

    def run(self):
        inplace = self.inplace or getattr(self, "editable_mode", False)
        directory = None if inplace else Path(self.build_lib).resolve() / PACKAGE
        build = load_build()
        try:
            path = build.compile(directory, os.environ.get("CXX"))
        except (build.BuildError, OSError) as error:
            print(f"sparkjax: native CPU kernels are not built, going on without: {error}")
            return
        print(f"sparkjax: built {path.name}")
        if not inplace:
            self.built = path

    def get_outputs(self):
        return [os.path.relpath(self.built)] if self.built else []

    def get_output_mapping(self):
        return {}

    def get_source_files(self):
        return [str(path) for pattern in ("*.cc", "*.h") for path in sorted(PACKAGE.glob(pattern))]


setup(
    # Never compiled as such; it makes the wheel one for this platform and runs the command above.
    ext_modules=[Extension("sparkjax.kernels.native.library", [])],
    cmdclass={"build_ext": BuildNative},
)

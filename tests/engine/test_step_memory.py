"""Stacked weights and caches stay whole: no copy of a layer or of a cache in the compiled step."""

from __future__ import annotations

import pytest
from step_memory import SHAPES, compiled_step

from sparkjax.kernels import native
from sparkjax.mesh import gb10
from sparkjax.mesh.context import Context


@pytest.mark.parametrize("rows, tokens", SHAPES)
@pytest.mark.parametrize("dtype", ["float32"])
def test_the_cpu_step_needs_less_than_one_layer(dtype: str, rows: int, tokens: int):
    if not native.available():
        pytest.skip(f"the native kernels are not built: {native.why_not()}")
    compiled, layer, kv = compiled_step(Context(dtype=dtype, platform="cpu"), rows, tokens)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < layer
    assert memory.alias_size_in_bytes == kv, "the caches are updated in place"


@pytest.mark.gb10
@pytest.mark.parametrize("rows, tokens", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gb10_step_needs_less_than_one_layer(dtype: str, rows: int, tokens: int):
    try:
        mesh = gb10.compile_only_mesh()
    except gb10.Unavailable as error:
        pytest.skip(str(error))
    context = Context(dtype=dtype, platform="cuda")
    compiled, layer, kv = compiled_step(context, rows, tokens, mesh)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < layer
    assert memory.alias_size_in_bytes == kv, "the caches are updated in place"

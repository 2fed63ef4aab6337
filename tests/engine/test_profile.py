"""A profile reads like the model: the blocks' names stand in a trace of running requests."""

from __future__ import annotations

import jax

from sparkjax.model import Model

SCOPES = ("embed", "attention", "mlp", "logits", "sample")


def test_a_trace_of_generation_names_the_blocks(tmp_path):
    model = Model.load("tests/golden/llama")
    model.generate([1, 2, 3, 4, 5], max_tokens=2)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(tmp_path, profiler_options=options):
        model.generate([5, 4, 3, 2, 1], max_tokens=4)
    (file,) = tmp_path.rglob("*.xplane.pb")
    names = _names(file.read_bytes())
    prefill = {name for name in names if name.startswith("jit(_tile)")}
    for programs in (prefill, names - prefill):
        for scope in SCOPES:
            assert any(f"/{scope}/" in name for name in programs), f"no operation of {scope}"


def _names(trace: bytes) -> set[str]:
    """What looks like a path of scopes."""
    found = set()
    for piece in trace.split(b"jit(")[1:]:
        end = next((i for i, byte in enumerate(piece) if not 32 <= byte < 127), len(piece))
        found.add("jit(" + piece[:end].decode())
    return found

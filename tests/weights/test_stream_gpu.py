"""A GPU's weights: read through a small host buffer, the same bits as a CPU's."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import jax
import numpy as np
import pytest

from sparkjax.models.params import Dim, Param
from sparkjax.models.registry import family_of
from sparkjax.weights import direct, load, stream
from sparkjax.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("group", [3000, 256 << 20])
@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe", "glm5_next"])
def test_a_gpu_holds_what_the_host_would(monkeypatch, family, group):
    monkeypatch.setattr(stream, "GROUP", group)
    checkpoint = open_checkpoint(GOLDEN / family)
    module = family_of(checkpoint.config)
    tree = module.declare(module.read_config(checkpoint.config), 2)
    plans = [stream.plan(tree, checkpoint, 2, 1) for _ in range(2)]
    gpu = jax.devices("cuda")[0]
    with direct.Reader(checkpoint.files) as reader:
        expected = stream.to_host(list(plans[0].values()), reader, checkpoint)
        for leaf, host in zip(plans[1].values(), expected, strict=True):
            held = stream.to_device(leaf, reader, checkpoint, gpu)
            for a, b in zip(jax.tree.leaves(held), jax.tree.leaves(host), strict=True):
                assert a.devices() == {gpu}
                np.testing.assert_array_equal(np.asarray(a), b)


def test_the_host_never_holds_a_large_parameter(tmp_path):
    """3 GiB of one stacked parameter through a buffer of an eighth of one, which the runtime has a
    pinned one of its own beside: half a GiB in all. Before it, the device and its libraries are there,
    which take 0.6 GiB by themselves."""
    layers, rows, columns = 12, 16384, 16384
    header, size = {}, rows * columns
    for i in range(layers):
        span = [i * size, (i + 1) * size]
        header[f"{i}.w"] = {"dtype": "F8_E4M3", "shape": [rows, columns], "data_offsets": span}
    text = json.dumps(header).encode()
    row = np.random.default_rng(0).integers(0, 0x70, (256, columns), dtype=np.uint8)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i in range(layers):
            for _ in range(rows // len(row)):
                file.write((row + i).tobytes())
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.quantized = {}
    tree = {"w": Param("{layer}.w", (Dim(rows), Dim(columns)), layers=tuple(range(layers)))}
    warm = jax.jit(lambda x: jax.lax.dynamic_update_slice(x, x[:1], (1, 0)))
    jax.block_until_ready(warm(jax.device_put(np.ones((4, 4)), jax.devices("cuda")[0])))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    params = jax.block_until_ready(load.load_params(tree, checkpoint))
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    print(f"peak of the host's resident memory: {more:.2f} GiB more")
    assert more < 0.5
    for i in (0, layers - 1):
        np.testing.assert_array_equal(np.asarray(params["w"][i, -256:]).view(np.uint8), row + i)

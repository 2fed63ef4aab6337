"""Manifests' tables of tensors against the published counts; what differs is itemised and derived."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparkjax.manifests import Manifest, read_manifest, read_manifests
from sparkjax.models import tables
from sparkjax.weights.safetensors import SafetensorsFile

ROOT = Path(__file__).parents[2]
PUBLISHED = {
    "glm-5.3-flash-fp8": 76_108,
    "glm-5.3-flash-hybrid": 112_396,
    "glm-5.3-int4-int8mix": 175_985,
    "deepseek-v4-flash": 72_317,
    "deepseek-v4.1-flash": 96_085,
    "qwen3.5-122b-a10b-nvfp4": 149_309,
    "qwen3.8-flash-next-fp8": 152_089,
}
UNEXPLAINED = {"glm-5.3-flash-fp8": 36, "glm-5.3-flash-hybrid": 36, "glm-5.3-int4-int8mix": 132}
"""Tensors whose absence is a guess in the manifest, not a derivation."""


def manifest(name: str) -> Manifest:
    return read_manifest(ROOT / "checkpoints" / f"{name}.yaml")


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name):
    found = manifest(name)
    names = [name for name, _ in found.published_tensors()]
    assert len(set(names)) == len(names)
    assert found.tensors == PUBLISHED[name] == len(names) + sum(found.apart.values())
    guessed = -sum(n for words, n in found.apart.items() if "are not there" in words)
    assert guessed == UNEXPLAINED.get(name, 0)


def test_every_known_count_is_met():
    for found in read_manifests(ROOT / "checkpoints"):
        if found.tensors is not None:
            assert found.tensors == len(list(found.published_tensors())) + sum(found.apart.values())


@pytest.mark.parametrize(
    ("name", "family", "blocks"),
    [
        ("glm-5.3-flash-fp8", "glm5_next", 24),
        ("qwen3.5-122b-a10b-nvfp4", "qwen3_5_moe", 27),
        ("qwen3.8-flash-next-fp8", "qwen4_exp", 27),
    ],
)
def test_vision_towers_have_the_tensors_of_a_small_one(name, family, blocks):
    """A golden checkpoint has a tower of one block, written by the reference implementation."""
    file = SafetensorsFile(ROOT / "tests" / "golden" / family / "model.safetensors")
    tower = [n for n in file.tensors if n.startswith("model.visual.")]
    block = [n for n in tower if ".blocks.0." in n]
    around = len(tower) - len(block)
    words = f"vision tower: {blocks} blocks of {len(block)}, {around} around them"
    assert manifest(name).apart[words] == blocks * len(block) + around


def test_the_n_gram_table_is_128_shards_and_four_tensors():
    found = manifest("qwen3.8-flash-next-fp8")
    config = found.family.read_config(found.config)
    declared = [
        t for t in tables.declared(found.family, config).values() if isinstance(t, tables.Table)
    ]
    assert sum("{shard}" in t.name for t in declared) == 1
    small = [t for t in declared if "{shard}" not in t.name]
    assert 128 + 1 + len(small) == found.apart["n-gram table: 128 shards, one scale, 3 small ones"]


def test_dspark_stages_are_layers_with_a_few_tensors_beside():
    """The release has three stages where others have one MTP layer: each is a layer of scored
    experts with window attention, like that one without what joins it to the model."""
    found = manifest("deepseek-v4-flash")
    layer = [
        n.removeprefix("mtp.0.") for n, _ in found.published_tensors() if n.startswith("mtp.0.")
    ]
    assert -found.apart["the one MTP layer of the other releases"] == len(layer)
    joins = r"(e_proj|h_proj|enorm|hnorm|norm|hc_head_\w+)(\.weight|\.scale)?"
    stage = [n for n in layer if not re.fullmatch(joins, n)]
    # main_norm; main_proj and its scale; confidence_head; hc_head's three; two Markov tables; norm.
    beside = 1 + 2 + 1 + 3 + 2 + 1
    assert (
        found.apart["DSpark stages under mtp.*: 3 of 1565, 10 beside them"]
        == 3 * len(stage) + beside
    )

    # V4.1: 128 experts a stage, no hc_head.
    dense = [n for n in stage if ".experts." not in n]
    v41 = manifest("deepseek-v4.1-flash")
    assert (
        v41.apart["DSpark stages under mtp.*: 3 of 797, 7 beside them"]
        == 3 * (len(dense) + 128 * 3 * 2) + beside - 3
    )
    layers = v41.family.read_config(v41.config).layers
    assert v41.apart["router biases of image tokens"] == layers


def test_apart_holds_numbers(tmp_path):
    text = (ROOT / "checkpoints" / "qwen3-0.6b.yaml").read_text()
    path = tmp_path / "x.yaml"
    path.write_text(text.replace("config:\n", "apart: {some: many}\nconfig:\n", 1))
    with pytest.raises(ValueError, match=r"x\.yaml: apart: allowed: words -> a number of tensors"):
        read_manifest(path)

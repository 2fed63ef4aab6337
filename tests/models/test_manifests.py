"""Real-size declarations of every published checkpoint build without allocating."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sparkjax.manifests import Manifest, read_manifest, read_manifests

FOLDER = Path(__file__).parent.parent.parent / "checkpoints"
PARAMETERS = {
    # Totals as published (model_families: parameters without prediction layers and vision), in 1e9.
    "glm-5.3-flash-fp8": 313,
    "glm-5.3-int4-int8mix": 743,
    "glm-4.7-nvfp4": 353,
    "deepseek-v4-flash": 284.3,
    "qwen3.8-flash-next-fp8": 126,
    "qwen3.8-27b-fp8": 26.9,
    "qwen3.5-122b-a10b-nvfp4": 122,
    "mimo-v2-flash": 308.8,
    "flint": 39.8,
}


def all_manifests() -> list[Manifest]:
    return read_manifests(FOLDER)


@pytest.mark.parametrize("manifest", all_manifests(), ids=lambda m: m.name)
def test_expected_tensors_and_bytes_per_rank(manifest: Manifest):
    tensors = dict(manifest.expected_tensors())
    assert all("{" not in name for name in tensors)
    one = manifest.bytes_per_rank(1)
    for ranks in (2, 3, 4, 6):
        share = manifest.bytes_per_rank(ranks)
        assert one / ranks <= share < one / ranks * 1.35 + 1e8, "sharded but for small replicated parts"


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name: str):
    manifest = read_manifest(FOLDER / f"{name}.yaml")
    family, config = manifest.family, manifest.family.read_config(manifest.config)
    from sparkjax.models import params

    tree = family.declare(config, 1)
    count = sum(
        math.prod(dim.size for dim in param.dims) * len(list(param.places()))
        for _, param in params.leaves(tree)
    )
    assert count / 1e9 == pytest.approx(PARAMETERS[name], rel=0.005)


def test_a_manifest_with_a_missing_field_is_refused(tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_text("product: X\n")
    with pytest.raises(ValueError, match=r"x\.yaml: missing fields: config"):
        read_manifest(path)


def test_a_manifest_may_share_another_ones_config(tmp_path: Path):
    shared = read_manifest(FOLDER / "glm-5.3-flash-nvfp4.yaml")
    assert shared.config == read_manifest(FOLDER / "glm-5.3-flash-fp8.yaml").config
    path = tmp_path / "x.yaml"
    path.write_text((FOLDER / "glm-5.3-flash-nvfp4.yaml").read_text())
    with pytest.raises(ValueError, match=r"x\.yaml: config: there is no manifest 'glm-5\.3-flash-fp8'"):
        read_manifest(path)

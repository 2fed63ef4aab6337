"""The benchmark over several GPUs, run dry: processes on this CPU, tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import quick
from served_world import CACHE, TESTS

LLAMA, MOE, LATENT = (TESTS / "golden" / name for name in ("llama", "glm4_moe", "glm_moe_dsa"))


@pytest.mark.parametrize(
    "transports, models, ranks",
    [
        (["shm"], [LLAMA], [2]),
        pytest.param(["shm", "xla"], [LLAMA, MOE], [2], marks=pytest.mark.slow),
        # The benchmark wants weights that lie in the same order for any number of ranks.
        pytest.param(["shm", "xla"], [LATENT], [2, 4], marks=pytest.mark.slow),
    ],
)
def test_the_dry_run_finds_that_ranks_agree(tmp_path: Path, transports, models, ranks):
    command = [
        sys.executable,
        TESTS.parent / "bench" / "mesh_gpus.py",
        "--platform",
        "cpu",
        "--tiny",
    ]
    command += ["--transports", *transports, "--models", *models, "--ranks", *map(str, ranks)]
    done = subprocess.run(
        [*command, "--out", tmp_path, "--cache", CACHE],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **quick.ENVIRON},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    receipt = json.loads(done.stdout)
    worlds = [f"{transport}{n}" for n in ranks for transport in transports]
    assert list(receipt["collectives"]) == worlds and receipt["problems"] == []
    # The sums are the same, whatever carries them.
    bits = {(w["ranks"], w["loop"]["bits"]) for w in receipt["collectives"].values()}
    assert len(bits) == len(ranks)
    for rows in receipt["models"].values():
        assert list(rows) == ["none1", *worlds]
        for row in rows.values():
            assert row["decode_ms"] > 0 and row["tile_ms"] > 0 and row["planned_decode_ms"] > 0
            assert row["same_bits"] and row["digests_equal"]
        for name in worlds:
            assert rows[name]["tokens_of_one_rank"]["equal_tokens"] > 0
    plot = ElementTree.parse(tmp_path / "mesh.svg").getroot()
    assert len(plot.findall("{*}g")) == 2 * len(models)

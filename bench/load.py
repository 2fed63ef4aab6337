"""How fast a rank's weights load, against a cold direct read of the same files in the same run.

    python bench/load.py FOLDER [--rounds 3] [--parallel 16]

Makes in FOLDER (once; about 4.4 GB) a checkpoint of random bytes with the real layer shapes and the
published layout of GLM-5.3-Flash FP8: three dense layers and one sparse one, with fewer experts.
Every measurement is a process of its own, after its files have been dropped from the page cache:

- the reference reads the files from first to last byte with O_DIRECT, as many reads at a time as
  the loader uses, into one buffer a thread, so that nothing is kept; a second one keeps what it reads
  in fresh memory, which on some virtual machines takes longer than reading;
- "all" is `load_params` for the last rank of 1, 2 and 4; "rows" and "columns" read only the
  parameters that are cut along that axis;
- before each, as much memory as it will fill is touched and let go (see `settle`);
- "image" is the same for the rank's device-ready image, against a direct read of that file.

Rates are those of the reading; "seconds" has opening and planning in it too. They count the bytes of
the 4,096-byte pages that the wanted bytes lie in. Prints one JSON receipt:
medians over the rounds of rates and of their ratios to the reference reads that came right before,
and the largest peak of resident memory above the bytes of the share.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import receipts

MANIFEST = Path(__file__).parents[1] / "checkpoints" / "glm-5.3-flash-fp8.yaml"
LAYERS, EXPERTS = 4, 24
FILES = 4
RANKS = (1, 2, 4)


# --- The checkpoint -------------------------------------------------------------------------------


def make(folder: Path) -> None:
    """Writes the checkpoint, where it is not there yet."""
    import dataclasses

    from sparkjax.manifests import read_manifest
    from sparkjax.weights.published import written
    from sparkjax.weights.safetensors import DTYPES

    if (folder / "model.safetensors.index.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(MANIFEST)
    text = dict(manifest.config["text_config"])
    text |= {
        "num_hidden_layers": LAYERS,
        "n_routed_experts": EXPERTS,
        "num_nextn_predict_layers": 0,
        **{k: text[k][:LAYERS] for k in ("indexer_types", "layer_types", "mlp_layer_types")},
    }
    config = {**manifest.config, "text_config": text}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    manifest = dataclasses.replace(manifest, config=config)
    names = {dtype: name for name, dtype in DTYPES.items()}
    wide = dict(dtypes_of(manifest))
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name, shape in manifest.expected_tensors():
        layout = manifest.layout(name)
        parts = written(layout, name, *shape) if layout else {name: (wide[name], shape)}
        for part, (dtype, size) in parts.items():
            tensors[part] = (names[np.dtype(dtype)], size, int(np.prod(size)) * dtype.itemsize)
    share = sum(n for _, _, n in tensors.values()) / FILES
    files: list[list[str]] = [[]]
    filled = 0
    for name, (_, _, nbytes) in tensors.items():
        if filled > share and len(files) < FILES:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += nbytes
    where = {}
    # Bytes below 0x70 are finite numbers in every dtype there is.
    noise = np.random.default_rng(0).integers(0, 0x70, 64 << 20, dtype=np.uint8).tobytes()
    for i, members in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        header, at = {}, 0
        for name in members:
            kind, size, nbytes = tensors[name]
            header[name] = {"dtype": kind, "shape": size, "data_offsets": [at, at + nbytes]}
            where[name] = file
            at += nbytes
        raw = json.dumps(header).encode()
        raw = raw.ljust(-(-len(raw) // 8) * 8)
        with (folder / file).open("wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            while at:
                at -= out.write(noise[: min(at, len(noise))])
            out.flush()
            os.fsync(out.fileno())
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def dtypes_of(manifest: Any) -> list[tuple[str, np.dtype]]:
    """What unquantized tensors are stored as."""
    from sparkjax.models import params

    return [
        (param.name.format(**fill), np.dtype(params.dtype_of(param, "bfloat16")))
        for _, param in params.leaves(manifest.declare())
        for _, fill in param.places()
    ]


# --- One measurement ------------------------------------------------------------------------------


def drop(files: list[Path]) -> None:
    """Takes files out of the page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_all(files: list[Path], parallel: int, keep: bool) -> dict[str, float]:
    """A reference; `keep` what is read or not."""
    from sparkjax.weights import direct

    jobs = []
    for file in files:
        fd, size = os.open(file, os.O_RDONLY | os.O_DIRECT), file.stat().st_size
        jobs += [(fd, at, min(at + direct.CHUNK, size)) for at in range(0, size, direct.CHUNK)]
    if keep:
        settle(len(jobs) * direct.CHUNK)
        memory = direct.pages(len(jobs) * direct.CHUNK)
        buffers = [memory[i * direct.CHUNK :][: direct.CHUNK] for i in range(len(jobs))]
    else:
        buffers = [direct.pages(direct.CHUNK, reused=True) for _ in range(parallel)]
        for buffer in buffers:
            buffer[:] = 1

    def one(job: tuple[int, int, int]) -> int:
        buffer = buffers.pop()
        if keep:
            direct.populate(buffer)
        direct.read_at(job[0], buffer, job[1], job[2])
        if not keep:
            buffers.append(buffer)
        return job[2] - job[1]

    started = time.perf_counter()
    with ThreadPoolExecutor(parallel) as pool:
        nbytes = sum(pool.map(one, jobs))
    return {"bytes": nbytes, "seconds": time.perf_counter() - started}


def settle(nbytes: int) -> None:
    """Touches as much memory as will be filled, and lets it go.

    The host of a virtual machine takes idle memory back and has to find it again, page by page and
    at several times the cost of a page fault; a machine of its own does neither.
    """
    from sparkjax.weights import direct

    memory = direct.pages(nbytes)
    memory[:: direct.PAGE] = 1
    del memory
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew


def peak() -> int:
    """The most bytes of resident memory so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["VmHWM"].split()[0]) * 1024


def load(folder: Path, ranks: int, axis: str, images: Path | None, parallel: int) -> dict:
    """One rank's share: all of it, or what is cut along one axis."""
    import jax

    from sparkjax.mesh import rules
    from sparkjax.models import params as declarations
    from sparkjax.models.registry import family_of
    from sparkjax.weights import direct, stream
    from sparkjax.weights import load as loading
    from sparkjax.weights.checkpoint import open_checkpoint

    # Imports are not what is measured.
    jax.devices()
    family_of(json.loads((folder / "config.json").read_text()))
    rank = ranks - 1
    times: list[float] = []

    class Times(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg.startswith("weights: %"):
                times.append(record.args[1])

    settle(sum(f.stat().st_size for f in folder.glob("*.safetensors")) // ranks)
    logging.getLogger("sparkjax").setLevel(logging.INFO)
    logging.getLogger("sparkjax").addHandler(Times())
    started = time.perf_counter()
    checkpoint = open_checkpoint(folder)
    family = family_of(checkpoint.config)
    tree = family.declare(family.read_config(checkpoint.config), ranks)
    reading = loading.Reading(parallel=parallel, direct=True)
    kept: Any
    if axis == "all":
        options: dict = {"images": loading.Images(images)} if images else {}
        kept = loading.load_params(
            tree, checkpoint, ranks=ranks, rank=rank, reading=reading, **options
        )
        jax.block_until_ready(kept)
        seconds = time.perf_counter() - started
        reading_seconds = times[0]
        nbytes = sum(a.nbytes for a in jax.tree.leaves(kept))
        chosen = stream.plan(tree, checkpoint, ranks, rank)
    else:
        with direct.Reader(checkpoint.files, parallel=parallel) as reader:
            plan = stream.plan(tree, checkpoint, ranks, rank)
            cut = {}
            for path, param in declarations.leaves(tree):
                spec = rules.spec([d.axis for d in param.dims], ranks)
                at = next((i for i, s in enumerate(spec) if s is not None), None)
                cut[path] = {0: "rows", 1: "columns"}.get(at) if len(param.dims) == 2 else None
            chosen = {path: leaf for path, leaf in plan.items() if cut[path] == axis}
            begun = time.perf_counter()
            kept = stream.to_host(list(chosen.values()), reader, checkpoint)
        seconds = time.perf_counter() - started
        reading_seconds = time.perf_counter() - begun
        nbytes = sum(leaf.nbytes for leaf in chosen.values())
    most = peak()
    touched = sum(
        direct.touched(source)
        for leaf in chosen.values()
        for plane in jax.tree.leaves(leaf.tree)
        for source in plane.sources
    )
    return {
        "seconds": seconds,
        "reading_seconds": reading_seconds,
        "share_bytes": nbytes,
        "touched_bytes": nbytes if images else touched,
        "above_share": most - nbytes,
    }


# --- All of them ----------------------------------------------------------------------------------


def child(*arguments: Any) -> dict:
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return json.loads(out.stdout.splitlines()[-1])


def measure(folder: Path, files: list[Path], parallel: int, rounds: int, *what: Any) -> dict:
    """A load in turns with the reference."""
    rates, peaks = [], []
    ratios: dict[str, list[float]] = {"read": [], "keep": []}
    for _ in range(rounds):
        references = {}
        for kind in ratios:
            drop(files)
            references[kind] = child(kind, parallel, *files)
        drop(files)
        found = child("load", parallel, folder, *what)
        rates.append(found["touched_bytes"] / found["reading_seconds"] / 1e9)
        for kind, reference in references.items():
            ratios[kind].append(rates[-1] / (reference["bytes"] / reference["seconds"] / 1e9))
        peaks.append(found["above_share"])
    return {
        "share_gb": round(found["share_bytes"] / 1e9, 3),
        "touched_gb": round(found["touched_bytes"] / 1e9, 3),
        "seconds": round(found["seconds"], 2),
        "gb_per_s": round(statistics.median(rates), 3),
        "ratio": round(statistics.median(ratios["read"]), 3),
        "ratio_kept": round(statistics.median(ratios["keep"]), 3),
        "ratios": {kind: [round(r, 3) for r in each] for kind, each in ratios.items()},
        "peak_above_share_gib": round(max(peaks) / 2**30, 3),
    }


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        kind, parallel, *rest = sys.argv[2:]
        if kind in ("read", "keep"):
            print(json.dumps(read_all([Path(p) for p in rest], int(parallel), kind == "keep")))
        else:
            folder, ranks, axis, images = rest
            place = None if images == "-" else Path(images)
            print(json.dumps(load(Path(folder), int(ranks), axis, place, int(parallel))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    args = parser.parse_args()
    checkpoint = args.folder / "glm-flash-shapes"
    make(checkpoint)
    files = sorted(checkpoint.glob("*.safetensors"))
    results: dict[str, dict] = {}
    for ranks in args.ranks:
        for axis in ("all",) if ranks == 1 else ("all", "rows", "columns"):
            name = f"rank of {ranks}, {axis}"
            results[name] = measure(
                checkpoint, files, args.parallel, args.rounds, ranks, axis, "-"
            )
            print(name, results[name], file=sys.stderr)
        images = args.folder / "images"
        written = child("load", args.parallel, checkpoint, ranks, "all", images)
        (image,) = images.glob(f"*of{ranks}.img")
        name = f"image of rank of {ranks}"
        results[name] = measure(
            checkpoint, [image], args.parallel, args.rounds, ranks, "all", images
        )
        results[name]["first_start_seconds"] = round(written["seconds"], 2)
        print(name, results[name], file=sys.stderr)
        image.unlink()
    receipts.show({"rounds": args.rounds, "parallel": args.parallel, "results": results})


if __name__ == "__main__":
    main()

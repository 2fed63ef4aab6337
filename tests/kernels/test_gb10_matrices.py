"""`linear` and the expert layer compiled for GB10: within its shared memory, no copies of weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import packed_weights as weights
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sparkjax.kernels.linear import rotated, triton, tuning
from sparkjax.kernels.linear.planes import spec_of
from sparkjax.kernels.moe import apart, groups
from sparkjax.kernels.moe import triton as moe
from sparkjax.kernels.moe.shapes import SHAPES
from sparkjax.mesh import gb10
from sparkjax.models.layers.mlp import silu
from sparkjax.weights.formats import COLS, ROWS

pytestmark = pytest.mark.gb10
N, K = 512, 2048


@pytest.fixture(scope="module")
def place():
    try:
        return NamedSharding(gb10.compile_only_mesh(), PartitionSpec())
    except gb10.Unavailable as error:
        pytest.skip(str(error))


def temporaries(function, place, *arguments):
    """Bytes that the program compiled for these needs beside arguments and results. A kernel that
    wants more than a block's 101,376 bytes of shared memory does not compile."""
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arguments
    )
    with jax.set_mesh(place.mesh):
        done = jax.jit(function).lower(*shapes).compile()
    return done.memory_analysis().temp_size_in_bytes


OTHERS = ("int4 by 32", "awq by 32", "int8 zeros", "gptq 7 bits", "gptq 7 bits planar", "gptq 8 bits",
          *weights.GGUF, "exl3 4 mcg", "exl3 2.5 mul1", "exl3 8 mul1", "exl3 3 mcg/e4m3")  # fmt: skip
QUICK = ("fp8 block", "nvfp4", "awq", "exl3 4 mcg")
"""Some of all kinds."""


def sizes(kinds, *rows, quick=QUICK):
    """Every format at every count of rows; all but `quick` at the first count are slow."""
    return pytest.mark.parametrize(
        "kind, rows",
        [
            pytest.param(k, n, marks=[] if k in quick and n == rows[0] else [pytest.mark.slow])
            for k in kinds
            for n in rows
        ],
    )


@sizes([*weights.FORMATS, *OTHERS], 1, 16, 64)
def test_linear_reads_the_stack_in_place(place, kind, rows):
    stack = weights.weight(kind, (2,), N, K)
    found = temporaries(lambda x, w: triton.linear(x, w, 1), place, weights.rows(rows, K), stack)
    # x by fields, and the parts of sums that programs share.
    splits = max(16, tuning.tile_for(spec_of(stack), rows).splits)
    assert found <= rows * (2 * K + splits * 4 * N) + 4096


@sizes(["fp8 block", "bf16", "nvfp4", "int4"], 1, 64)
def test_a_group_is_one_launch_that_reads_the_stacks_in_place(place, kind, rows):
    sizes = (N, 64, N)
    stacks = [weights.weight(kind, (2,), n, K) for n in sizes]
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), (weights.rows(rows, K), stacks)
    )
    with jax.set_mesh(place.mesh):
        done = jax.jit(lambda x, w: triton.linear_group(x, w, 1)).lower(*shapes).compile()
    assert done.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') == 1
    found = done.memory_analysis().temp_size_in_bytes
    assert found <= rows * (2 * K + 16 * 4 * sum(sizes)) + 4096


@pytest.mark.parametrize("kind", [k for k in weights.GGUF if k.endswith("K")])
def test_linear_compiles_where_sums_are_not_split(place, kind):
    stack = weights.weight(kind, (2,), 64, 256)
    temporaries(lambda x, w: triton.linear(x, w, 1), place, weights.rows(1, 256), stack)


@sizes([*weights.FORMATS, *OTHERS], 256, quick=("fp8 block",))
def test_many_rows_need_one_panel(place, kind, rows):
    stack = weights.weight(kind, (2,), N, K)
    found = temporaries(lambda x, w: triton.linear(x, w, 1), place, weights.rows(rows, K), stack)
    # In a rotated basis x and sums are there too.
    more = rows * (2 * K + 4 * N + 4) if kind.startswith("exl3") else 0
    assert found <= (0 if kind == "bf16" else 2 * N * K) + more + 4096


@pytest.mark.slow
@pytest.mark.parametrize("axis", [ROWS, COLS])
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_what_is_cut_inside_of_a_block_is_read_in_place(place, axis, rows):
    stack = weights.stacked(("exl3 2 mcg",), (2,), N, K, axis, (50, 350))
    x = weights.rows(rows, stack.shape[-1])
    found = temporaries(lambda x, w: triton.linear(x, w, 1), place, x, stack)
    # x in its places and rotated, sums of programs that share them, outputs of whole blocks.
    assert found <= rows * (4 * K + 16 * 4 * N + 4 * N) + (2 * N * K if rows > 64 else 0) + 4096


def expert_splits(w, rows, k, weights):
    """In how many parts the sums over the inputs of these experts are cut."""
    specs = [rotated.padded(s) if s.code == "trellis" else s for s in apart.specs(w)]
    return max(tuning.expert_tile(s, rows, 8, k, weights).splits for s in specs)


def expert_programs(place, rows, k, gate, up, down):
    """Bytes of temporaries of the expert layer."""
    hidden = gate.shape[-1]
    ids, share = jnp.zeros((rows, k), jnp.int32), jnp.zeros((rows, k), jnp.float32)
    run = lambda x, i, s, g, u, d: moe.experts(x, i, s, g, u, d, 1, silu)  # noqa: E731
    return temporaries(run, place, weights.rows(rows, hidden), ids, share, gate, up, down)


@sizes(weights.FORMATS, 64, 1, 512, quick=("nvfp4",))
def test_experts_read_the_stacks_in_place(place, kind, rows):
    count, k, width = 8, 2, 256
    gate, up = (weights.weight(kind, (2, count), width, N) for _ in range(2))
    down = weights.weight(kind, (2, count), N, width)
    found = expert_programs(place, rows, k, gate, up, down)
    into, out = expert_splits(gate, rows, k, 2), expert_splits(down, rows, k, 1)
    parts = 8 * width * into if into > 1 else 0
    # Hidden and output rows of every pair (parts of both), x by fields, the tiles' lists.
    assert found <= rows * (k * (4 * width + parts + 2 * N + 4 * N * out) + 2 * N) + 65536


MODELS = {
    "GLM-5.3-Flash": ("exl3 2 mcg",),
    "GLM-5.3, one of 3": ("exl3 3 mcg",),
    "DeepSeek-V4.1-Flash, one of 4": ("exl3 3.5 mul1",),
    "DeepSeek-V4.1-Flash, one of 4, of three rates": ("exl3 2 mcg", "exl3 3.5 mul1", "exl3 8 mul1"),
}


def shape_of(name):
    return SHAPES[name.removesuffix(", of three rates")]


def experts_of(name, axis):
    """Shapes of a recipe's experts, made of those of one of each kind."""
    kinds, shape = MODELS[name], shape_of(name)
    whole, slots = shape.whole or shape.width, shape.experts // len(kinds)
    sizes = (whole, shape.hidden) if axis == ROWS else (shape.hidden, whole)
    cut = (43, 43 + shape.width) if shape.whole else None
    one = weights.stacked(kinds, (1, len(kinds)), *sizes, axis, cut)
    lead = (2, shape.experts) if len(kinds) == 1 else (2 * slots, 1)
    more = jax.tree.map(lambda a: jax.ShapeDtypeStruct((*lead, *a.shape[2:]), a.dtype), one)
    if len(kinds) == 1:
        return more
    turns = range(2 * shape.experts)
    return more.replace(
        kinds=tuple(i % len(kinds) for i in turns),
        slots=tuple(i // len(kinds) for i in turns),
        stacked=(2, shape.experts),
    )


def test_a_projection_of_a_recipe_reads_the_stack_in_place(place):
    shape, rows = SHAPES["GLM-5.3, one of 3"], 8
    pairs = rows * shape.chosen

    def run(x, ids, share, w):
        choice = apart.Choice(ids, *groups.tiles(ids, shape.experts, 8))
        return apart.project(x, w, 1, choice, share)

    ids, share = (jnp.zeros((rows, shape.chosen), d) for d in (jnp.int32, jnp.float32))
    x = jnp.zeros((pairs, shape.width), jnp.float32)
    down = experts_of("GLM-5.3, one of 3", COLS)
    found = temporaries(run, place, x, ids, share, down)
    # x in its places and rotated, sums.
    assert found <= pairs * (6 * shape.whole + 4 * shape.hidden) + 65536


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [1, 8, 64, 2048])
def test_experts_of_recipes_read_the_stacks_in_place(place, name, rows):
    shape, gate = shape_of(name), experts_of(name, ROWS)
    whole, down = shape.whole or shape.width, experts_of(name, COLS)
    found = expert_programs(place, rows, shape.chosen, gate, gate, down)
    into, out = (expert_splits(w, rows, shape.chosen, 1) for w in (gate, down))
    # Of every pair x and sums of gate and up in their bases, then those of down (parts of them); the
    # tiles' lists.
    most = 4 * shape.hidden * out + (16 + 8 * into) * whole
    assert found <= len(MODELS[name]) * rows * shape.chosen * most + (1 << 20)

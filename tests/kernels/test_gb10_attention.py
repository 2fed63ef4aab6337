"""The kernels around matrix products compile for GB10 at real models' shapes.

XLA refuses a kernel that wants more than the 99 KiB of shared memory that a block has there.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sparkjax.kernels.attention import shapes as attention_shapes
from sparkjax.kernels.attention import triton as attention
from sparkjax.kernels.candidates import shapes as candidate_shapes
from sparkjax.kernels.candidates import triton as candidates
from sparkjax.kernels.gated_delta import shapes as delta_shapes
from sparkjax.kernels.gated_delta import triton as delta
from sparkjax.kernels.hyper import shapes as hyper_shapes
from sparkjax.kernels.hyper import triton as hyper
from sparkjax.kernels.indexer import shapes as indexer_shapes
from sparkjax.kernels.indexer import triton as indexer
from sparkjax.kernels.kda import shapes as kda_shapes
from sparkjax.kernels.short_conv import shapes as conv_shapes
from sparkjax.kernels.short_conv import triton as conv
from sparkjax.kernels.sparse_attention import shapes as latent_shapes
from sparkjax.kernels.sparse_attention import triton as latent
from sparkjax.kernels.sparse_gqa import shapes as grouped_shapes
from sparkjax.kernels.sparse_gqa import triton as grouped
from sparkjax.mesh import gb10

pytestmark = pytest.mark.gb10
LAYERS, PAGE, TABLE = 2, 64, 64
form = pytest.mark.parametrize(
    "rows, tokens",
    [
        pytest.param(8, 1, id="decode"),
        pytest.param(4, 4, id="verification", marks=pytest.mark.slow),
        pytest.param(1, 512, id="prefill"),
    ],
)


def models(*tables):
    """The models of some tables of shapes; all but the first one are slow."""
    names = [
        pytest.param(name, marks=[pytest.mark.slow] if i or table is not tables[0] else [])
        for table in tables
        for i, name in enumerate(table)
    ]
    return pytest.mark.parametrize("name", names)


@pytest.fixture(scope="module")
def mesh():
    try:
        return gb10.compile_only_mesh()
    except gb10.Unavailable as error:
        pytest.skip(str(error))


def of(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape):
    return of(*shape, dtype=jnp.int32)


def floats(*shape):
    return of(*shape, dtype=jnp.float32)


def compiled(mesh, function, *args, donate=(), **kwargs):
    """The program for one GB10."""
    one = NamedSharding(mesh, PartitionSpec())
    args, kwargs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), (args, kwargs)
    )
    with jax.set_mesh(mesh):
        return jax.jit(function, donate_argnums=donate).lower(*args, **kwargs).compile()


@form
@models(attention_shapes.SHAPES)
def test_attention(mesh, name, rows, tokens):
    shape = attention_shapes.SHAPES[name]
    q = of(rows, tokens, shape.heads, shape.dim)
    sinks = {"sinks": floats(shape.heads)} if shape.sinks else {}
    ends = ints(rows), ints(rows)
    if shape.window:
        run = functools.partial(attention.ring_attention, scale=0.1, window=shape.window)
        new = [of(rows, tokens, shape.kv_heads, dim) for dim in (shape.dim, shape.value_dim)]
        rings = [
            of(LAYERS, rows, shape.window - 1, shape.kv_heads, dim)
            for dim in (shape.dim, shape.value_dim)
        ]
        compiled(mesh, run, q, *new, *rings, ints(), ints(rows), *ends, **sinks)
    else:
        run = functools.partial(attention.paged_attention, scale=0.1)
        planes = [
            of(LAYERS, rows * TABLE, PAGE, shape.kv_heads, dim)
            for dim in (shape.dim, shape.value_dim)
        ]
        compiled(mesh, run, q, *planes, ints(), ints(rows, TABLE), *ends, **sinks)


@form
@pytest.mark.parametrize("places", [1, pytest.param(4, marks=pytest.mark.slow)])
@models(delta_shapes.SHAPES, kda_shapes.SHAPES)
def test_states_are_updated_in_place(mesh, name, places, rows, tokens):
    if name in kda_shapes.SHAPES:
        one = kda_shapes.SHAPES[name]
        keys, values, dim, dim_v, channels = one.heads, one.heads, one.dim, one.dim, (one.dim,)
    else:
        shape = delta_shapes.SHAPES[name]
        keys, values, dim, dim_v, channels = (
            shape.keys,
            shape.values,
            shape.dim,
            shape.value_dim,
            (),
        )
    plane = floats(LAYERS, rows, places, values, dim, dim_v)
    program = compiled(
        mesh,
        delta.gated_delta,
        of(rows, tokens, keys, dim),
        of(rows, tokens, keys, dim),
        of(rows, tokens, values, dim_v),
        floats(rows, tokens, values, *channels),
        floats(rows, tokens, values),
        plane,
        ints(),
        *(ints(rows) for _ in range(3)),
        donate=(5,),
    )
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == 4 * math.prod(plane.shape)
    assert memory.temp_size_in_bytes == 0


@form
@models(latent_shapes.SHAPES)
def test_latent_attention(mesh, name, rows, tokens):
    shape = latent_shapes.SHAPES[name]
    args = {
        "plane": of(LAYERS, rows * TABLE, PAGE, shape.dim),
        "layer": ints(),
        "pages": ints(rows, TABLE),
        "selected": ints(rows, tokens, shape.chosen),
    }
    if shape.window:
        seen = shape.window - 1 + tokens
        args |= {"rows": of(rows, seen, shape.dim), "seen": of(rows, tokens, seen, dtype=jnp.bool_)}
    if shape.sinks:
        args["sinks"] = floats(shape.heads)
    run = functools.partial(latent.latent_attention, scale=0.1, value_dim=shape.value_dim)
    compiled(mesh, run, of(rows, tokens, shape.heads, shape.dim), **args)


@form
@models(grouped_shapes.SHAPES)
def test_sparse_grouped_attention(mesh, name, rows, tokens):
    shape = grouped_shapes.SHAPES[name]
    plane = of(LAYERS, rows * TABLE, PAGE, shape.kv_heads, shape.dim)
    q, selected = of(rows, tokens, shape.heads, shape.dim), ints(rows, tokens, shape.chosen)
    run = functools.partial(grouped.sparse_attention, scale=0.1)
    compiled(mesh, run, q, plane, plane, ints(), ints(rows, TABLE), selected)


@form
@models(indexer_shapes.SHAPES, candidate_shapes.SHAPES)
def test_indexers(mesh, name, rows, tokens):
    coarse = candidate_shapes.SHAPES.get(name)
    shape = coarse or indexer_shapes.SHAPES[name]
    table = 4 * TABLE
    args = (
        of(rows, tokens, shape.heads, shape.dim),
        floats(rows, tokens, shape.heads),
        of(LAYERS, rows * table, PAGE, shape.dim),
        ints(),
        ints(rows, table),
        ints(rows, tokens),
    )
    if coarse is None:
        compiled(mesh, functools.partial(indexer.select, k=shape.chosen, scale=0.1), *args)
        return
    settings = {"size": coarse.size, "scale": 0.1}
    compiled(mesh, functools.partial(candidates.pick_blocks, k=coarse.blocks, **settings), *args)
    within = functools.partial(candidates.select_within, k=coarse.chosen, **settings)
    compiled(mesh, within, *args, ints(rows, tokens, coarse.blocks))


@form
@models(conv_shapes.SHAPES)
def test_convolutions(mesh, name, rows, tokens):
    shape = conv_shapes.SHAPES[name]
    tail = floats(rows, (shape.width - 1) * shape.dilation, shape.channels)
    run = functools.partial(conv.short_conv, dilation=shape.dilation)
    compiled(mesh, run, of(rows, tokens, shape.channels), tail, of(shape.channels, shape.width))


@form
@models(hyper_shapes.SHAPES)
def test_hyper_connections(mesh, name, rows, tokens):
    shape = hyper_shapes.SHAPES[name]
    n, inputs = shape.streams, shape.streams * shape.hidden
    run = functools.partial(hyper.coefficients, rounds=shape.rounds, eps=1e-6, norm_eps=1e-5)
    weight = of(LAYERS, (2 + n) * n, inputs, dtype=shape.dtype)
    extra = floats(LAYERS, (2 + n) * n), floats(LAYERS, 3)
    compiled(mesh, run, of(rows, tokens, n, shape.hidden), weight, *extra, ints())

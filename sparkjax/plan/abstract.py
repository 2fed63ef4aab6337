"""A model without weights: the real programs of a published checkpoint, to be compiled only."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..engine import state as states
from ..engine.programs import HEADER, Programs
from ..engine.records import Limits
from ..mesh.context import Context
from ..model import Model
from ..models import cache as caches
from ..models import params as declarations


def place(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Shapes with shardings: every array below a PartitionSpec of `specs` gets it."""

    def one(spec: PartitionSpec, below: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), below
        )

    return jax.tree.map(one, specs, tree, is_leaf=lambda s: isinstance(s, PartitionSpec))


def model_of(
    family: Any, config: Any, tree: declarations.Tree, weights: Any, context: Context, mesh: Mesh
) -> Model:
    """A model whose parameters are shapes only.

    Args:
      tree: the declarations over `context.ranks`.
      weights: shapes by the same paths (arrays or quantized nodes of shapes), of all ranks.
      mesh: devices to compile for, as many as ranks.
    """
    params = place(weights, declarations.specs(tree, context.ranks), mesh)
    return Model(family, config, params, context, mesh if context.ranks > 1 else None)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """The engine's programs, lowered for the mesh's devices (see `engine.programs`)."""

    advance: Any
    choose: Any
    tile: Any


def lower(model: Model, limits: Limits, mesh: Mesh) -> Lowered:
    """The decode step's programs at the limits' largest row count, and the largest prefill tile."""
    vocab, words = model.config.vocab, -(-model.config.vocab // 32)
    width = -(-limits.context // limits.page_size)
    rows, tile = limits.rows[-1], limits.tiles[-1]
    everywhere = NamedSharding(mesh, PartitionSpec())

    def shape(dims: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=everywhere)

    declared = model.family.declare_caches(model.config, model.context.ranks)
    sizes = caches.Sizes(limits.pages, limits.page_size, limits.slots)
    kv = place(
        caches.shapes(declared, sizes, model.context.dtype),
        caches.specs(declared, model.context.ranks),
        mesh,
    )
    slots = jax.tree.map(
        lambda s: shape(s.shape, s.dtype),
        jax.eval_shape(lambda: states.empty_slots(limits.slots, vocab)),
    )
    state = states.State(kv, slots)

    def prelude(count: int, tokens: int) -> Any:
        shapes = getattr(model.family, "prelude_shapes", None)
        found = shapes(model.config) if shapes else {}
        return {n: shape((count, tokens, *s), jnp.float32) for n, s in found.items()} or None

    programs, numbers = Programs(model), shape((rows, HEADER + width))
    with jax.set_mesh(mesh):  # Pallas asks it which GPU it writes for
        advance = programs.advance.lower(model.params, state, numbers, prelude(rows, 1))
        residual = jax.tree.map(lambda s: shape(s.shape, s.dtype), advance.out_info[1])
        mask = shape((rows, words), jnp.uint32)
        choose = programs.choose.lower(model.params, slots, numbers, residual, mask)
        tokens = shape((1, tile))
        prefill = programs.tile.lower(
            model.params,
            state,
            shape((1, HEADER + width)),
            tokens,
            tokens,
            shape((1, words), jnp.uint32),
            prelude(1, tile),
        )
    return Lowered(advance, choose, prefill)

"""The decode and prefill steps of a mid-sized llama as abstract programs, for memory tests."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from sparkjax.mesh.context import Context
from sparkjax.models import cache as caches
from sparkjax.models import llama
from sparkjax.models import params as declarations
from sparkjax.models.batch import Batch

LAYERS = 12
CONFIG = llama.read_config(
    {
        "vocab_size": 512,
        "hidden_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    }
)
SHAPES = [(2, 1), (8, 1), (1, 64)]


def compiled_step(context: Context, rows: int, tokens: int, mesh: Any = None) -> tuple[Any, int, int]:
    """(the compiled step, bytes of one layer's weights, bytes of all caches)."""
    place = NamedSharding(mesh, PartitionSpec()) if mesh is not None else None

    def abstract(tree: Any) -> Any:
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), tree)

    tree = llama.declare(CONFIG, 1)
    sizes = caches.Sizes(pages=64, page_size=16, slots=8)
    declared = llama.declare_caches(CONFIG, 1)
    params = abstract(declarations.shapes(tree, context.dtype))
    kv = abstract(caches.shapes(declared, sizes, context.dtype))
    shapes = ((rows, tokens), (rows,), (rows,), (rows, 8), (rows,))
    batch = abstract(Batch(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in shapes)))

    def step(params: Any, kv: Any, batch: Batch) -> Any:
        out = llama.forward(params, kv, batch, CONFIG, context)
        return llama.logits(params, out.residual[:, -1], CONFIG, context), out.cache

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=1).lower(params, kv, batch).compile()
    layer = declarations.nbytes(tree["layers"], context.dtype) // LAYERS
    return compiled, layer, caches.nbytes(declared, sizes, context.dtype)

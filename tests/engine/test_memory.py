"""The memory table against the arrays themselves."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from sparkjax.engine import memory
from sparkjax.model import Model
from sparkjax.models import cache as caches

GOLDEN = Path(__file__).parent.parent / "golden"


def held(tree, device) -> int:
    """Bytes of a tree's arrays on one device."""
    shards = [s for a in jax.tree.leaves(tree) for s in a.addressable_shards if s.device == device]
    return sum(s.data.nbytes for s in shards)


@pytest.mark.parametrize("family", ["llama", "glm5_next", "deepseek_v4"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_table_is_what_one_device_holds(family: str, ranks: int):
    model = Model.load(GOLDEN / family, ranks=ranks)
    tree = model.declared(ranks)
    items = memory.weight_items(tree, model.params, ranks)
    first = jax.devices()[0]
    assert sum(item.nbytes for item in items) == held(model.params, first)
    sizes = caches.Sizes(pages=3, page_size=model.page, slots=2)
    declared = model.family.declare_caches(model.config, ranks)
    items = memory.cache_items(declared, sizes, ranks, model.context.dtype)
    assert sum(item.nbytes for item in items) == held(model.new_caches(sizes), first)


def test_the_largest_pool_fits_and_one_page_more_does_not():
    model = Model.load(GOLDEN / "llama")
    declared = model.family.declare_caches(model.config, 1)
    room = 1_000_000
    pool = memory.largest_pool(declared, model.page, 2, 1, "float32", room)

    def size(pages: int) -> int:
        sizes = caches.Sizes(pages, model.page, 2)
        return sum(i.nbytes for i in memory.cache_items(declared, sizes, 1, "float32"))

    pages = pool.tokens // model.page
    assert size(pages) <= room < size(pages + 1) and pool.page == size(2) - size(1)


def test_the_plan_names_its_largest_items_and_what_is_missing():
    items = [memory.Item("weights", "layers (fp8)", 3 << 30), memory.Item("caches", "k", 1 << 30)]
    plan = memory.MemoryPlan(tuple(items), available=2 << 30)
    assert plan.free == -(2 << 30)
    assert plan.largest(1) == "weights layers (fp8) 3.00 GiB"

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkjax.engine.pool import PagePool, PoolError


def test_lowest_ids_first():
    pool = PagePool(6)
    assert pool.alloc(4) == [0, 1, 2, 3]
    pool.release([2, 0])
    assert pool.alloc(3) == [0, 2, 4]
    pool.check()


def test_generation_rises_when_the_last_holder_lets_go():
    pool = PagePool(2)
    [page] = pool.alloc(1)
    pool.share(page)
    pool.release([page])
    assert (pool.generation(page), pool.free) == (0, 1)
    pool.release([page])
    assert (pool.generation(page), pool.free) == (1, 2)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.release([3]),
        lambda pool: pool.release([0, 0]),
        lambda pool: pool.release([1, 4]),
        lambda pool: pool.release([-1]),
        lambda pool: pool.share(3),
        lambda pool: pool.alloc(2),
        lambda pool: pool.alloc(-1),
        lambda pool: pool.generation(4),
    ],
)
def test_misuse_raises_and_changes_nothing(misuse):
    pool = PagePool(4)
    pool.alloc(3)
    with pytest.raises(PoolError):
        misuse(pool)
    assert (pool.free, pool.used) == (1, 3)
    pool.check()
    pool.release([0, 1, 2])
    assert pool.free == 4


@given(st.lists(st.tuples(st.sampled_from("asr"), st.integers(0, 7)), max_size=60))
def test_books_balance(operations):
    pool, holders = PagePool(8), []
    for verb, number in operations:
        if verb == "a" and number <= pool.free:
            free = sorted(set(range(8)) - set(holders))
            pages = pool.alloc(number)
            assert pages == free[:number]
            holders += pages
        elif verb == "s" and number in holders:
            pool.share(number)
            holders.append(number)
        elif verb == "r" and number in holders:
            pool.release([number])
            holders.remove(number)
        pool.check()
        assert pool.used == len(set(holders))
        assert all(pool.holders(page) == holders.count(page) for page in range(8))

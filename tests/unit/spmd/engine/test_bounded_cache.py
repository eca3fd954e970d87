"""The cache with two generations: what it keeps, what it drops, and what it says of that."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from spmd.engine.driver.bounded_cache import BoundedCache

KEYS = st.integers(0, 12)


@given(limit=st.integers(2, 9), accesses=st.lists(st.tuples(st.booleans(), KEYS), max_size=200))
def test_it_keeps_the_half_that_was_used_last_and_never_more_than_its_limit(
    limit: int, accesses: list[tuple[bool, int]]
) -> None:
    dropped: list[int] = []
    cache: BoundedCache[int, int] = BoundedCache(limit, dropped.append)
    stored: dict[int, int] = {}  # the newest value of each key
    used: OrderedDict[int, None] = OrderedDict()  # the last one used is the last
    for number, (is_store, key) in enumerate(accesses):
        if is_store:
            cache[key] = stored[key] = number
        elif (found := cache[key]) is not None:
            assert found == stored[key]
        else:
            assert key not in list(used)[-(limit // 2) :]
            continue
        used[key] = None
        used.move_to_end(key)
        kept = cache.contents()
        assert len(kept) <= limit
        assert all(kept[each] == stored[each] for each in list(used)[-(limit // 2) :])
    assert not set(dropped) & set(cache.contents().values())


def test_what_is_not_used_is_dropped_once_and_is_unknown_then() -> None:
    dropped: list[str] = []
    cache: BoundedCache[int, str] = BoundedCache(4, dropped.append)
    for key in range(5):
        cache[key] = f"value {key}"
        assert cache[0] is not None
    assert dropped == ["value 1", "value 2"]
    assert cache.contents() == {0: "value 0", 3: "value 3", 4: "value 4"}
    assert cache[1] is None


def test_a_value_that_is_replaced_drops_nothing() -> None:
    dropped: list[int] = []
    cache: BoundedCache[str, int] = BoundedCache(4, dropped.append)
    cache["a"] = cache["b"] = 0
    for number in range(100):
        cache["a"] = number
    assert not dropped
    assert cache.contents() == {"a": 99, "b": 0}

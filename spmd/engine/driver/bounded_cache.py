"""A cache with a limit, in which a lookup costs no more than in a dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["BoundedCache"]

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, "V | None"], Generic[K, V]):
    """A mapping with at most ``limit`` items, in which ``cache[key]`` is None for an unknown key.

    Items are in two generations. New items, and items that are looked up, are in the recent generation,
    which is the dict itself. When it holds half of the limit, it becomes the older generation, and the items
    that are still in the previous older generation are dropped. So the ``limit // 2`` keys used last are
    always there.

    Use only ``cache[key]``, ``cache[key] = value`` and ``contents()``. Not thread-safe.

    Args:
        limit: Maximum number of items, 2 or more.
        dropped: called with each value that is dropped.

    Example::

        cache: BoundedCache[str, Compiled] = BoundedCache(256)
        found = cache[source]
        if found is None:
            found = cache[source] = compiled(source)
    """

    __slots__ = ("_dropped", "_half", "_older")

    def __init__(self, limit: int, dropped: Callable[[V], object] | None = None) -> None:
        super().__init__()
        self._half = max(1, limit // 2)
        self._dropped = dropped
        self._older: dict[K, V | None] = {}

    def __missing__(self, key: K) -> V | None:
        found = self._older.pop(key, None)
        if found is not None:
            self[key] = found
        return found

    def __setitem__(self, key: K, value: V | None) -> None:
        if len(self) >= self._half and key not in self:
            previous, self._older = self._older, dict(self)
            self.clear()
            if self._dropped is not None:
                for each in previous.values():
                    if each is not None:
                        self._dropped(each)
        super().__setitem__(key, value)

    def contents(self) -> dict[K, V]:
        """A copy of all items."""
        return {key: value for key, value in (self._older | self).items() if value is not None}

"""Locks for parameters: who updates one in place, or lends it a gradient, holds its lock.

Each trainer may have an optimizer of its own for the same parameters, and the sets may overlap in any way.
Parameters that are first named together share one lock, so an optimizer mostly has exactly one. Several are
taken in the order in which they were made, so that no two can wait for each other.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import Final

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["ParameterLocks"]


class _Lock:
    """A lock with its place in the order."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()


_numbers: Final = itertools.count()
_table_lock: Final = threading.Lock()
_table: Final[MutableMapping[Tensor, _Lock]] = WeakIdKeyDictionary()


class ParameterLocks:
    """The locks of some parameters of this process.

    Args:
        parameters: as Python objects; two that share memory count as two.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        with _table_lock:
            fresh = _Lock(next(_numbers))
            found = {_table.setdefault(parameter, fresh) for parameter in parameters}
        self._locks: list[_Lock] = sorted(found, key=lambda each: each.number)

    def held(self) -> AbstractContextManager[object]:
        """Holds all of them."""
        return self._locks[0].lock if len(self._locks) == 1 else self._all_held()

    @contextlib.contextmanager
    def _all_held(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in self._locks:
                stack.enter_context(each.lock)
            yield

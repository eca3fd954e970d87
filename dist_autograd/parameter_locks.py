"""Locks for parameters: who updates one in place, or lends it a gradient, holds its lock.

Each trainer may have an optimizer of its own for the same parameters, and the sets may overlap in any way.
Parameters that are first named together share one lock, so an optimizer mostly has exactly one. Several are
taken in the order in which they were made, so that no two can wait for each other.

Who holds a lock runs code of the user's: hooks, an optimizer. That must not wait for what needs a lock as
well, here or on another worker, so it is refused what does.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Final

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from rpc.errors import AutogradError

__all__ = ["ParameterLocks", "check_none_held"]


class _Lock:
    """A lock with its place in the order."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()


class _Holding(threading.local):
    locks: frozenset[_Lock] = frozenset()
    """Those that this thread holds."""


_holding: Final = _Holding()
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

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds all of them.

        Raises:
            AutogradError: this thread holds one of them already.
        """
        before = _holding.locks
        if not before.isdisjoint(self._locks):
            check_none_held("this")
        with contextlib.ExitStack() as stack:
            for each in self._locks:
                stack.enter_context(each.lock)
            _holding.locks = before.union(self._locks)
            try:
                yield
            finally:
                _holding.locks = before


def check_none_held(doing: str) -> None:
    """Raise ``AutogradError`` where a thread that holds locks is about to wait for who may need them.

    Args:
        doing: what the user has called.
    """
    if _holding.locks:
        raise AutogradError(
            f"{doing} was called by a hook of a model under DistributedDataParallel, or by an optimizer in "
            "the middle of its step, while parameters are locked: it could wait for ever. Call it when the "
            "backward, or the step, has returned"
        )

"""Locks for parameters: code that updates one in place, or uses its ``.grad``, holds its lock.

Each trainer may have an optimizer of its own for the same parameters, and the sets may overlap in any way.
Parameters that are first named together share one lock, so an optimizer usually has exactly one. Several are
taken in the order in which they were made, which prevents deadlock.

A thread that holds a lock runs user code: hooks, an optimizer. That code must not wait for anything that
needs a lock as well, here or on another worker, so calls that might wait are refused. The hooks of a backward
pass on a device run on the device's thread, while the thread that began the pass holds the locks.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from weakref import ref

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dist_autograd.device_threads import pass_of_this_thread
from rpc.errors import AutogradError

__all__ = ["LockTable", "ParameterLocks"]


class _Lock:
    """A lock with a position in the order. It is not reentrant: taking it twice raises."""

    __slots__ = ("__weakref__", "lock", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.RLock()

    def is_mine(self) -> bool:
        """Whether the current thread holds it."""
        mine: bool = self.lock._is_owned()  # type: ignore[attr-defined]
        return mine


class ParameterLocks:
    """The locks of some parameters; made by ``LockTable.of``.

    Args:
        locks: the locks.
        of_passes: the locks that backward passes hold, in the whole table.
    """

    def __init__(self, locks: Iterable[_Lock], of_passes: dict[object, ParameterLocks]) -> None:
        self._locks = sorted(locks, key=lambda each: each.number)
        self._of_passes = of_passes

    def held(self) -> AbstractContextManager[object]:
        """Return a context manager that holds all of them.

        A single lock is returned itself, so that no exception of a signal handler can come between taking it
        and entering the block that releases it.

        Raises:
            AutogradError: this thread, or the backward pass whose node it runs, holds one of them already.
        """
        of_pass = self._of_passes.get(pass_of_this_thread()) if self._of_passes else None
        shared = of_pass is not None and not set(self._locks).isdisjoint(of_pass._locks)
        if shared or any(each.is_mine() for each in self._locks):
            raise _refused("this")
        return self._locks[0].lock if len(self._locks) == 1 else self._all_held()

    @contextlib.contextmanager
    def held_by(self, backward: object) -> Iterator[None]:
        """Hold all of them inside the block, for the nodes of a backward pass on any thread."""
        with self.held():
            self._of_passes[backward] = self
            try:
                yield
            finally:
                del self._of_passes[backward]

    @contextlib.contextmanager
    def _all_held(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in self._locks:
                stack.enter_context(each.lock)
            yield


class LockTable:
    """The locks of all parameters of this worker that were ever named. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._of: MutableMapping[Tensor, _Lock] = WeakIdKeyDictionary()
        self._made: set[ref[_Lock]] = set()
        self._of_passes: dict[object, ParameterLocks] = {}

    def __len__(self) -> int:
        return len(self._of)

    def of(self, parameters: Iterable[Tensor]) -> ParameterLocks:
        """Return the locks of some parameters, as Python objects: two that share memory count as two."""
        with self._lock:
            fresh = _Lock(next(self._numbers))
            self._made.add(ref(fresh, self._made.discard))
            locks = {self._of.setdefault(parameter, fresh) for parameter in parameters}
        return ParameterLocks(locks, self._of_passes)

    def check_none_held(self, doing: str) -> None:
        """Raise ``AutogradError`` if this thread, or the backward pass whose node it runs, holds locks, as it
        is about to wait for code that may need them.

        Args:
            doing: name of the function that the user has called.
        """
        of_pass = self._of_passes and pass_of_this_thread() in self._of_passes
        made = [found for each in self._made.copy() if (found := each()) is not None]
        if of_pass or any(each.is_mine() for each in made):
            raise _refused(doing)


def _refused(doing: str) -> AutogradError:
    return AutogradError(
        f"{doing} was called by a hook of a model under DistributedDataParallel, or by an optimizer in the "
        "middle of its step, while parameters are locked: it could wait for ever. Call it when the "
        "backward, or the step, has returned"
    )

"""Named objects: ``remote(..., name=...)`` names an object, and ``find`` returns a reference to it.

Each worker keeps the names of its own objects, and ``find`` asks all workers. So there is no directory that
could be lost or wrong: a name ends with the worker that has the object, and workers that join later find it.
The price is that ``find`` sends a message to each worker, unless the owner is given, and that two workers can
use one name without noticing: then ``find`` raises an error that names both.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from rpc.agent.agent import UNSET_TIMEOUT
from rpc.agent.futures import Future
from rpc.agent.hooks import Hooks
from rpc.agent.interface import AgentInterface
from rpc.errors import (
    InvalidNameError,
    NameTakenError,
    NotInitializedError,
    RpcError,
    RpcTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.group.membership import WorkerReference
from rpc.runtime import waits
from rpc.runtime.blocking import INFINITE, Event, check_may_block, wait_for_event
from rpc.runtime.current import current_agent, extension
from rpc.runtime.interrupts import protected
from rpc.serialization.serializer import Serializer
from rref.protocol.messages import RRefId
from rref.reference import RRef, references
from rref.references import References

__all__ = ["EXTENSION", "Names", "check_object_name", "find", "remove_name"]

EXTENSION: Final = "names"
"""Key of the ``Names`` in an agent's extensions."""

_NAME: Final = re.compile("[A-Za-z0-9_:./-]+")
_MAX_NAME: Final = 255
_MAX_NAMES: Final = 1 << 16
"""Maximum number of named objects of one worker."""

_OTHERS_SECONDS: Final = 1.0
"""Time in seconds for other workers to answer that they have an object of that name, too."""

_FIRST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 1.0
"""Pauses in seconds between searches for an object that is not there yet; each is twice the one before."""

_SHOWN: Final = 8
"""Maximum number of workers named in an error."""


def check_object_name(name: object) -> str:
    """Return ``name``; raise ``InvalidNameError`` unless it can be the name of an object."""
    if not isinstance(name, str) or len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        shown = f"{name[:40]!r}..." if isinstance(name, str) and len(name) > 40 else f"{name!r:.60}"
        raise InvalidNameError(
            f"the name of an object has 1 to {_MAX_NAME} ASCII letters, digits and characters of '_:./-'; "
            f"got {shown}"
        )
    return name


class Names:
    """The named objects of one worker. From any thread."""

    def __init__(self, references: References, serializer: Serializer, hooks: Hooks) -> None:
        self._references = references
        self._lock = threading.RLock()  # reentrant: a finalizer may remove a name
        self._named: dict[str, RRef[Any]] = {}
        for function in (_named, _unnamed):
            serializer.allow_function(function)
        hooks.closed.append(self._named.clear)

    @protected
    def claim(self, name: str, rref: RRefId) -> None:
        """Give an object a name, which keeps it.

        Raises:
            NameTakenError: another object of this worker has the name.
        """
        own = self._references.workers.own
        with self._lock:
            if name in self._named:
                raise NameTakenError(
                    f"worker '{own.name}' has an object named '{name}' already: {self._named[name]!r}. Use "
                    f"it, by rpc.find('{name}'), or remove its name first, by rpc.remove_name('{name}')"
                )
            if len(self._named) >= _MAX_NAMES:
                raise RpcError(f"worker '{own.name}' has {_MAX_NAMES} named objects, and accepts no more")
            self._named[name] = RRef._of(self._references, own, rref, self._references.expect(rref))

    def find(self, name: str) -> RRef[Any] | None:
        """Return a reference to the object with a name, or None."""
        return self._named.get(name)

    @protected
    def remove(self, name: str, rref: RRefId | None = None) -> bool:
        """Remove a name, if it is that of the given object, or of any; returns whether it was there."""
        with self._lock:
            found = self._named.get(name)
            if found is None or (rref is not None and found._rref != rref):
                return False
            del self._named[name]
        return True


def _names() -> Names:
    found: Names = extension(EXTENSION)
    return found


def _named(name: str) -> RRef[Any] | None:
    """Called by other workers: return a reference to the object of this worker with a name."""
    return _names().find(check_object_name(name))


def _unnamed(name: str) -> bool:
    """Called by other workers: remove a name of this worker; returns whether it was there."""
    return _names().remove(check_object_name(name))


def find(name: str, timeout: float = UNSET_TIMEOUT, *, owner: WorkerReference | None = None) -> RRef[Any]:
    """Return a reference to the object that ``rpc.remote`` has created with this name, on whichever worker.

    It waits until there is such an object, and in a dynamic group until ``owner`` has joined, so the order in
    which workers start does not matter, and neither does a restart of its owner that creates it again: it
    searches at once, and then at least once a second.

    Args:
        name: the name.
        timeout: timeout in seconds; 0 for no limit. Default: the timeout of calls.
        owner: the worker that has the object; only that worker is asked, which is cheaper in a large group.
            Default: all workers that are in the group are asked.

    Returns:
        An ``RRef``, which can be used at once, even if the object is still being created.

    Raises:
        RpcTimeoutError: there was no such object in time.
        NameTakenError: several workers have an object with this name; the text says which.
        WorkerLostError: ``owner`` is gone, and cannot come back, as the group is static.
        UnknownWorkerError: ``owner`` is not in the group, and cannot join, as the group is static.
        InvalidNameError: no object can have this name.
        BlockingCallError: called inside an ``async def`` callee; use ``await asyncio.to_thread(rpc.find,
            name)`` there.

    Example::

        rpc.remote("worker0", ParameterServer, name="server")       # on any worker, once
        server = rpc.find("server")                                 # on every worker, now or later
        server.rpc_sync().pull()
    """
    check_object_name(name)
    check_may_block()
    search = _Search(name, timeout, owner)
    pause = _FIRST_PAUSE
    with waits.waiting("rpc.find", search.asked, name=name):
        while True:
            found = search.run(_named)
            if len(found) > 1:
                several = ", ".join(f"{rref!r}" for _, rref in sorted(found.items()))
                raise NameTakenError(
                    f"{len(found)} workers have an object named '{name}': {several}. Remove the name of one "
                    f"with rpc.remove_name('{name}', owner=...), or say which with rpc.find('{name}', "
                    "owner=...)"
                )
            if found:
                rref: RRef[Any] = next(iter(found.values()))
                return rref
            wait_for_event(Event(), min(time.monotonic() + pause, search.deadline))
            if time.monotonic() >= search.deadline:
                raise search.too_late(
                    f"no object is named '{name}': rpc.remote(..., name='{name}') creates one"
                )
            pause = min(2 * pause, _LONGEST_PAUSE)


def remove_name(name: str, timeout: float = UNSET_TIMEOUT, *, owner: WorkerReference | None = None) -> bool:
    """Remove the name of an object, on whichever worker. ``find`` does not find the object then, which lives
    on as long as there are references to it. Arguments as for ``find``.

    Returns:
        Whether an object had the name.

    Raises:
        RpcTimeoutError: no object was found to have the name, but not all workers have answered in time.
        UnknownWorkerError: ``owner`` is not in the group.
    """
    check_object_name(name)
    check_may_block()
    if owner is not None:
        owner = current_agent().get_worker_info(owner).name
    search = _Search(name, timeout, owner)
    with waits.waiting("rpc.remove_name", search.asked, name=name):
        removed = search.run(_unnamed)
    if not removed and search.silent:
        raise search.too_late(f"the name '{name}' is perhaps not removed")
    return bool(removed)


class _Search:
    """A search for the worker that has an object with a name.

    Attributes:
        deadline: deadline on the monotonic clock, infinite for no limit.
        silent: names of the workers that have not answered in the last run.
    """

    def __init__(self, name: str, timeout: float, owner: WorkerReference | None) -> None:
        agent: AgentInterface = current_agent()
        shell = references()
        self._agent = agent
        self._is_static = shell.workers.view.static
        self._name = name
        self._seconds = shell.calls.effective_timeout(timeout)
        self._owner = owner
        self._workers: list[str] = []
        self._under_way: dict[str, Future[Any]] = {}
        self.deadline = time.monotonic() + self._seconds if self._seconds else INFINITE
        self.silent: list[str] = []

    def asked(self) -> list[str]:
        """Return the names of the workers whose answers are awaited."""
        return list(self._under_way)

    def run(self, function: Callable[[str], Any]) -> dict[str, Any]:
        """Ask each worker once; returns what those have answered that have the object. If one has, the others
        are not waited for longer than a moment.
        """
        self._workers = self._to_ask()
        changed = Event()
        answered: list[tuple[str, Future[Any]]] = []
        under_way = self._under_way

        @protected
        def note(worker: str, future: Future[Any]) -> None:
            answered.append((worker, future))
            changed.set()

        found: dict[str, Any] = {}
        late: list[str] = []
        until = self.deadline
        try:
            for worker in self._workers:
                try:
                    future = self._agent.call_async(worker, function, (self._name,), {}, self._left())
                except (WorkerLostError, UnknownWorkerError):  # it has left in the meantime
                    continue
                under_way[worker] = future
                future.add_done_callback(partial(note, worker))
            while under_way:
                changed.clear()
                while answered:
                    worker, future = answered.pop()
                    del under_way[worker]
                    try:
                        value = self._answer(future)
                    except RpcTimeoutError:
                        late.append(worker)
                        continue
                    if value is True or isinstance(value, RRef):
                        found[worker] = value
                        until = min(until, time.monotonic() + _OTHERS_SECONDS)
                if under_way and not answered and not wait_for_event(changed, until):
                    break
        finally:
            self.silent = [*late, *under_way]
            for future in under_way.values():
                future.cancel()
            under_way.clear()
        return found

    def _to_ask(self) -> list[str]:
        if self._owner is None:
            return [each.name for each in self._agent.get_worker_infos()]
        try:
            self._owner = self._agent.get_worker_info(self._owner).name
        except UnknownWorkerError:
            if self._is_static:
                raise
            return []
        return [self._owner]

    def _left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001) if self._seconds else 0.0

    def _answer(self, future: Future[Any]) -> Any:
        try:
            return future.value()
        except WorkerLostError:
            if self._owner is not None and self._is_static:
                raise
        except NotInitializedError:  # that worker is leaving
            if current_agent() is not self._agent:  # there is none if this one leaves
                raise
        return None

    def too_late(self, what: str) -> RpcTimeoutError:
        """Return the error of a search without success."""
        if not self._workers:
            return RpcTimeoutError(f"{what}. Within {self._seconds:g} s, {self._owner!r:.300} has not joined")
        shown = ", ".join(f"'{each}'" for each in self._workers[:_SHOWN])
        more = f" and {len(self._workers) - _SHOWN} more" if len(self._workers) > _SHOWN else ""
        silent = ", ".join(f"'{each}'" for each in self.silent[:_SHOWN])
        return RpcTimeoutError(
            f"{what}. Within {self._seconds:g} s, workers {shown}{more} were asked"
            + (f"; no answer has come from {silent}" if silent else "")
        )

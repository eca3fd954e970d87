"""A barrier that waits for a worker which waits in ``shutdown``: found out, instead of waiting for ever.

That a worker is in shutdown proves little: it still answers calls, and one of these may be about to come to
the barrier. But if *every* worker of a static group waits, in shutdown or on its main thread in a barrier
without a timeout, and nothing else is under way anywhere, then nothing can ever begin again. As in
``rpc.group.termination``, two looks at all workers between which nothing has begun prove it. Threads that a
program has started itself are not known here, so the looks are seconds apart: these should not come to a
barrier after all else has been at rest for so long.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final, TypeVar

from rpc.agent.activity import Activity
from rpc.agent.caller import Caller
from rpc.agent.departure import Departure
from rpc.agent.futures import Future
from rpc.errors import ProtocolError, RpcError
from rpc.group.peer import PeerTable
from rpc.runtime import notices
from rpc.runtime.blocking import wait_for_event
from rpc.runtime.current import current_agent
from rpc.runtime.executor import Executor
from rpc.serialization.serializer import Serializer

__all__ = ["InVain", "Standing", "Standstill"]

_ANSWER_SECONDS: Final = 5.0
"""How long another worker may take to say how a wait stands."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Standing:
    """What one worker does. Travels as a tuple of its fields.

    Attributes:
        in_shutdown: a thread of it waits there.
        at_rest: it waits, in shutdown or with its main thread in a barrier, and all else that is under way
            waits in barriers.
        begun: how much has ever begun, but for inquiries how a wait stands.
    """

    in_shutdown: bool
    at_rest: bool
    begun: int


@dataclass(frozen=True, slots=True)
class InVain:
    """A barrier that cannot complete: why, in the words for those in it and for the others, in shutdown."""

    why: str
    to_others: str
    in_shutdown: list[str]


class Standstill:
    """What one agent knows of waits that are in vain. From any thread."""

    def __init__(
        self,
        caller: Caller,
        peers: PeerTable,
        executor: Executor,
        activity: Activity,
        departure: Departure,
        serializer: Serializer,
    ) -> None:
        self._caller = caller
        self._peers = peers
        self._executor = executor
        self._activity = activity
        self._departure = departure
        self._main = 0
        self._tasks = 0
        self._inquiries = 0
        self._lock = threading.Lock()
        for function in (_standing, _give_up_shutdown):
            serializer.allow_function(function)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The current thread waits in a barrier, without a limit."""
        main = threading.current_thread() is threading.main_thread()
        task = self._executor.owns_current_thread()
        self._count(main, task)
        try:
            yield
        finally:
            self._count(-main, -task)

    def serving(self) -> bool:
        """Whether this worker serves others while it waits."""
        return self._activity.serving(self._tasks)

    def inquire(self, name: str, function: Callable[..., T], *args: Any) -> Future[T]:
        """Ask another worker how a wait stands, by a function that says ``inquired`` there."""
        with self._lock:
            self._inquiries += 1
        return self._caller.call_async(name, function, args, {}, _ANSWER_SECONDS)

    def inquired(self) -> None:
        """Another worker has asked how a wait stands."""
        self._activity.inquired()

    def _count(self, main: int, task: int) -> None:
        with self._lock:
            self._main += main
            self._tasks += task

    def standing(self, asked: int) -> Standing:
        """What this worker does, apart from ``asked`` requests that want to know it."""
        begun = self._activity.begun() - self._activity.inquiries - self._inquiries
        in_shutdown = self._departure.under_way
        active = self._activity.under_way() - asked
        return Standing(in_shutdown, (in_shutdown or self._main > 0) and active == self._tasks, begun)

    def in_vain(self, missing: Sequence[str], complete: threading.Event) -> InVain | None:
        """Why a barrier that waits for some workers waits in vain, if that is certain. Takes some seconds,
        unless it is ``complete`` before.
        """
        if not self._peers.view.static or not self._is_stuck():
            return None
        me_name = self._peers.own.name
        others = [info.name for info in self._peers.view.infos() if info.name != me_name]
        leaving = [name for name in missing if name in others]
        try:
            first = self._look(others)
            if not all(each.at_rest for each in first.values()):
                return None
            if wait_for_event(complete, monotonic() + notices.FIRST_SECONDS):
                return None
            second = self._look(others)
        except RpcError:
            return None  # somebody is gone or does not answer: this is another matter
        if not self._is_stuck() or complete.is_set():
            return None
        for name in others:
            before, after = first[name], second[name]
            if not after.at_rest or after.begun != before.begun:
                return None
            if name in leaving and not after.in_shutdown:
                leaving.remove(name)
        if not leaving:
            return None
        who = ", ".join(f"'{name}'" for name in leaving)
        in_shutdown = [name for name in others if second[name].in_shutdown]
        waiting = ", ".join(f"'{name}'" for name in sorted({me_name, *others} - set(in_shutdown)))
        return InVain(
            f"{who} waits in shutdown(), and nothing is under way that could bring it to the barrier",
            f"{waiting} waits in a barrier for {who}, which is in shutdown",
            in_shutdown,
        )

    def end_shutdowns(self, found: InVain) -> None:
        """Have those raise who wait in shutdown; returns when they know, before this worker may leave."""
        self.tell(found.in_shutdown, _give_up_shutdown, found.to_others)

    def tell(self, names: Sequence[str], function: Callable[..., object], *args: Any) -> None:
        """Have workers call a function; returns when they have, or are gone, or do not answer."""
        told = []
        for name in names:
            with contextlib.suppress(RpcError):
                told.append(self._caller.call_async(name, function, args, {}, _ANSWER_SECONDS))
        for call in told:
            with contextlib.suppress(RpcError):
                call.wait()

    def _is_stuck(self) -> bool:
        """Whether this worker waits in barriers, and nothing else is under way."""
        me = self.standing(0)
        return me.at_rest and not me.in_shutdown

    def _look(self, names: Sequence[str]) -> dict[str, Standing]:
        asked: dict[str, Future[tuple[bool, bool, int]]] = {
            name: self.inquire(name, _standing) for name in names
        }
        return {name: Standing(*call.wait()) for name, call in asked.items()}


def _standing() -> tuple[bool, bool, int]:
    standstill: Standstill = current_agent().calls.gathering.standstill
    standstill.inquired()
    found = standstill.standing(1)
    return found.in_shutdown, found.at_rest, found.begun


def _give_up_shutdown(reason: str) -> None:
    if type(reason) is not str:
        raise ProtocolError("a shutdown is given up for a reason in words")
    current_agent().lifecycle.departure.give_up(reason)

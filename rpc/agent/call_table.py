"""The table of calls under way, and their deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, TypeVar, overload

from rpc.agent.pending_call import CallOwner, PendingCall
from rpc.errors import NotInitializedError
from rpc.group.peer import Peer
from rpc.runtime.blocking import INFINITE
from rpc.runtime.events import CallBegun, CallEnded, Events
from rpc.wire.frames import Frame

__all__ = ["CallTable"]

C = TypeVar("C", bound=PendingCall)


class CallTable:
    """All calls of one agent that have no reply yet. From any thread, except ``look``.

    Calls end long before their deadline as a rule, so nothing is kept per call: there is one alarm, no
    later than the earliest deadline, and when it rings the loop looks through the table and sets it anew.
    A blocking call needs no alarm: the thread that waits looks at the clock itself.

    Args:
        owner: decodes replies.
        loop: rings the alarm.
        settled: called on the loop's thread with futures that nobody waits for, after their deadline.
        events: told of calls that begin and end.
    """

    def __init__(
        self,
        owner: CallOwner,
        loop: asyncio.AbstractEventLoop,
        settled: Callable[[list[Any]], None],
        events: Events | None = None,
    ) -> None:
        self._events = Events() if events is None else events
        self._owner = owner
        self._loop = loop
        self._settled = settled
        self._pending: dict[int, PendingCall] = {}
        self._ids = itertools.count(1)
        self.opened = 0
        """How many calls were ever entered; of several simultaneous ones, some may be counted late."""
        self._given_up: dict[int, Peer] = {}
        self._alarm_at = INFINITE
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def unanswered(self) -> int:
        """How many calls their callees may still be working on, or about to: those given up, too."""
        return len(self._pending) + len(self._given_up)

    @overload
    def open(self, peer: Peer, what: object, timeout: float) -> PendingCall: ...

    @overload
    def open(self, peer: Peer, what: object, timeout: float, kind: type[C]) -> C: ...

    def open(
        self, peer: Peer, what: object, timeout: float, kind: type[PendingCall] = PendingCall
    ) -> PendingCall:
        """Enter a call of a kind, so that its reply will be found."""
        call_id = next(self._ids)
        call = kind(self._owner, call_id, peer, what, timeout)
        events = self._events
        if events.call_begun or events.call_ended:
            call.began = monotonic()
            call.when_ended = self.ended
            events.tell(events.call_begun, CallBegun(call_id, peer.name, call.asked))
        self._pending[call_id] = call
        self.opened = call_id
        return call

    def watch(self, call: PendingCall) -> None:
        """Have the loop end this call when its deadline passes."""
        try:
            call.watched = True
            if call.deadline < self._alarm_at:
                self._alarm_at = call.deadline
                self._look_soon()
        except BaseException:  # Ctrl-C: whether the loop was told is not known
            self._alarm_at = INFINITE
            self._look_soon()
            raise

    def ended(self, call: PendingCall, outcome: Frame | BaseException) -> None:
        """Tell that a call has ended, once, if that it began was told."""
        if call.when_ended is not None:
            call.when_ended = None
            error = outcome if isinstance(outcome, BaseException) else None
            ended = CallEnded(call.call_id, call.peer.name, call.asked, monotonic() - call.began, error)
            self._events.tell(self._events.call_ended, ended)

    def take(self, call_id: int) -> PendingCall | None:
        """Remove a call; None if it has ended already. Who gets it must settle it."""
        return self._pending.pop(call_id, None)

    def find(self, call_id: int) -> PendingCall | None:
        """The call, if it has not ended."""
        return self._pending.get(call_id)

    def give_up(self, call: PendingCall) -> bool:
        """Remove a call whose time is over, or that nobody waits for any more; false if it has just ended.

        Until the callee has answered it, or is gone, it still counts as under way.
        """
        self._given_up[call.call_id] = call.peer
        if self.take(call.call_id) is None:
            self._given_up.pop(call.call_id, None)
            return False
        if call.peer.lost is not None:
            self._given_up.pop(call.call_id, None)  # ``take_all`` may have been here before
        return True

    def answered_late(self, call_id: int) -> None:
        """The answer to a call that is not in the table has come."""
        self._given_up.pop(call_id, None)

    def restore(self, call: PendingCall) -> None:
        """Enter a call again that ``take`` has just removed."""
        self._pending[call.call_id] = call

    def take_all(self, peer: Peer) -> list[PendingCall]:
        """Remove all calls to one worker that is gone."""
        for call_id in [call_id for call_id, to in self._given_up.copy().items() if to is peer]:
            self._given_up.pop(call_id, None)
        mine = [call.call_id for call in self._pending.copy().values() if call.peer is peer]
        return [call for call in map(self.take, mine) if call is not None]

    def lost(self, peer: Peer) -> None:
        """A worker is gone: end all calls to it."""
        unattended = [
            call.future
            for call in self.take_all(peer)
            if call.settle(call.lost_error()) and call.future is not None
        ]
        self._settled(unattended)

    def expire(self, call: PendingCall) -> BaseException | None:
        """Give a call up because its time is over; None if its reply has just arrived."""
        if not self.give_up(call):
            return None
        error = call.timeout_error()
        self.ended(call, error)
        return error

    def end(self) -> None:
        """The agent ends: no call that is still under way will be answered."""
        with contextlib.ExitStack() as all_of_them:  # also when the callbacks of one raise
            for call in self.waiting():
                all_of_them.callback(self._end, call)

    def _end(self, call: PendingCall) -> None:
        if self.take(call.call_id) is not None:
            asked = f"{call.asked} on worker '{call.peer.name}'"
            error = NotInitializedError(f"RPC has been shut down: {asked} was not answered before")
            if call.settle(error) and call.future is not None:
                call.future.complete()

    def waiting(self) -> Iterable[PendingCall]:
        """All calls under way, as of now."""
        return self._pending.copy().values()

    def _look_soon(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all calls
            self._loop.call_soon_threadsafe(self.look)

    def look(self) -> None:
        """On the loop's thread: end the calls whose time is over, and set the alarm."""
        now = monotonic()
        earliest = INFINITE
        self._alarm_at = earliest
        unattended: list[Any] = []
        for call in self._pending.copy().values():
            if not call.watched:
                continue  # a thread waits for it and looks at the clock
            if call.deadline > now:
                earliest = min(earliest, call.deadline)
            elif (call.keeps_place or self.give_up(call)) and call.expired() and call.future is not None:
                unattended.append(call.future)
        if unattended:
            self._settled(unattended)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if earliest < INFINITE:
            self._alarm_at = min(self._alarm_at, earliest)
            self._timer = self._loop.call_later(max(0.0, earliest - now), self.look)

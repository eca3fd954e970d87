"""Calls under way, at their caller: how each ends, how a thread waits for that, and the table of them all.

Whoever reads the reply only stores it in the call. A thread that waits for it reads the connection itself if
that is free; else it waits on a lock of its own. Who waits decodes the reply; where nobody does, see
``futures``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable, KeysView
from concurrent.futures import CancelledError
from time import monotonic
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, Protocol, TypeVar, overload

from rpc.errors import BlockingCallError, NotInitializedError, ProtocolError, RpcTimeoutError, WorkerLostError
from rpc.group.peer import Peer
from rpc.runtime.blocking import INFINITE, this_thread
from rpc.runtime.events import Events
from rpc.runtime.interrupts import interruptible, protected
from rpc.transport.inline_read import Awaited
from rpc.wire.frames import Frame

__all__ = ["CallOwner", "CallTable", "PendingCall", "name_of"]

C = TypeVar("C", bound="PendingCall")

_NAMED_CALLABLES: Final = (FunctionType, BuiltinFunctionType, MethodType, type)


def name_of(what: object) -> str:
    """What is asked of a worker, for people; made without running code of the user's, such as a ``__repr__``.

    Args:
        what: a function, or what to call it.
    """
    if type(what) is FunctionType:
        return what.__qualname__
    if isinstance(what, str):
        return what
    if type(what) is BuiltinFunctionType and what.__module__ not in (None, "builtins"):
        return f"{what.__module__}.{what.__name__}"  # its qualified name is torch's own business
    named = what if isinstance(what, _NAMED_CALLABLES) else type(what)
    return str(named.__qualname__)


class CallOwner(Protocol):
    """What calls need from their agent."""

    def decode(self, call: PendingCall, frame: Frame) -> Any:
        """The value in a reply; raises what a failure carries."""

    def complete_soon(self, *futures: Any) -> None:
        """Have an executor thread call ``complete`` of futures."""

    def expire(self, call: PendingCall) -> BaseException | None:
        """Give a call up because its time is over; None if its reply has just arrived."""

    def cancel(self, call: PendingCall) -> bool:
        """End a call that nobody wants any more, and tell its callee; false if it has ended."""


class PendingCall(Awaited):
    """One call under way. ``settle`` is called once, by whoever reads its reply or gives it up.

    Attributes:
        call_id: names the call on the wire.
        peer: whom it was sent to.
        what: what was asked, for error messages.
        timeout: seconds that it may take, 0 for no limit.
        deadline: the same on the monotonic clock, infinite for no limit.
        arrivals: what travelled beside the reply's pickle, adopted when it arrived.
        future: the user's future, if there is one.
        holds: what must stay while the call is under way, such as a reference to the object that it is for.
        watched: the loop ends it when its deadline passes; else the thread that waits does.
        coalesced: its message may still wait for others.
        wants_graph: if its answer was computed from tensors that require grad and has no history, the log
            says so. False for calls made under ``no_grad``, and for those that callees make: whether there
            is a context is for the program to decide that has called them.
        last_seen: what its callee did when it was last asked, in words; "" if it was not asked.
        began, when_ended: where somebody listens to calls: when it was opened, and who is told of its end.
    """

    keeps_place = False
    """Whether a call stays in the table of calls when its time is over; it cannot be cancelled then."""

    # What most calls never set; a call is made for every message, so its making is kept short.
    arrivals: Any = None
    future: Any = None
    holds: Any = None
    outcome: Frame | BaseException | None
    watched = False
    last_seen = ""
    began = 0.0
    when_ended: Callable[[PendingCall, Frame | BaseException], None] | None = None
    coalesced = False
    wants_graph = True

    def __init__(self, owner: CallOwner, call_id: int, peer: Peer, what: object, timeout: float) -> None:
        self.owner = owner
        self.call_id = call_id
        self.peer = peer
        self.what = what
        self.timeout = timeout
        self.deadline = monotonic() + timeout if timeout else INFINITE
        self._waiters = []  # as ``Awaited`` does

    @property
    def asked(self) -> str:
        """What was asked; see ``name_of``."""
        return name_of(self.what)

    def timeout_error(self) -> RpcTimeoutError:
        """The error of this call when its time is over."""
        seen = f" {self.last_seen}." if self.last_seen else ""
        return RpcTimeoutError(
            f"RPC ran for more than its timeout of {self.timeout * 1000:.0f} ms: {self.asked} on worker "
            f"'{self.peer.name}' has not answered.{seen} Pass a larger timeout= (0 for none), or "
            "set_rpc_timeout()."
        )

    def lost_error(self) -> WorkerLostError:
        """The error of this call when its callee is gone."""
        return self.peer.lost_error(f"{self.asked} was not answered")

    def cancelled_error(self) -> CancelledError:
        """The error of this call when its caller has cancelled it."""
        return CancelledError(f"{self.asked} on worker '{self.peer.name}' was cancelled by its caller")

    def expired(self) -> bool:
        """The time is over: settle the call, and return what ``settle`` does."""
        return self.settle(self.timeout_error())

    def settle(self, outcome: Frame | BaseException) -> bool:
        """Store how the call ended and wake who waits.

        Returns whether nobody does, so that the future, if there is one, must be completed by others.
        """
        if self.when_ended is not None:
            self.when_ended(self, outcome)
        self.outcome = outcome
        return not self.wake()

    def abandon(self, error: BaseException) -> None:
        """End the call in a forked child, where no lock may be taken."""
        PendingCall.settle(self, error)

    # ---- waiting

    @protected
    def wait(self) -> None:
        """Block until the call has ended. Raises ``KeyboardInterrupt`` at once on Ctrl-C."""
        if self.outcome is not None and self.claimed is None:
            return
        if this_thread.must_not_block is not None:
            raise BlockingCallError(this_thread.must_not_block)
        try:
            if self.coalesced:
                self.peer.flush()
            self.peer.wait(self, self.deadline, reads=not self.keeps_place)
            if self.outcome is None and not self.sleep(INFINITE if self.watched else self.deadline):
                error = self.owner.expire(self)
                if error is not None:
                    self.outcome = error
                else:
                    self.sleep(INFINITE)  # its reply has just arrived
        except BaseException:
            if self.outcome is None and self.future is None:
                self.owner.expire(self)
            raise

    @interruptible  # decoding may take long
    def result(self) -> Any:
        """Wait, decode, and return the value or raise."""
        if self.outcome is None:
            self.wait()
        self.what = None  # a function of the user's, perhaps, which must not die where it is settled
        outcome = self.outcome
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None
        return self.owner.decode(self, outcome)


class CallTable:
    """All calls of one agent that have no reply yet. From any thread, except ``look``.

    Calls end long before their deadline as a rule, so nothing is kept per call: there is one alarm, no
    later than the earliest deadline, and when it rings the loop looks through the table and sets it anew.
    A blocking call needs no alarm: the thread that waits looks at the clock itself.

    Args:
        owner: decodes replies, and completes the futures that nobody waits for.
        loop: rings the alarm.
        events: told of calls that begin and end.

    Attributes:
        opened: how many calls were ever entered; of several simultaneous ones, some may be counted late.
    """

    def __init__(
        self, owner: CallOwner, loop: asyncio.AbstractEventLoop, events: Events | None = None
    ) -> None:
        self.opened = 0
        self._events = Events() if events is None else events
        self._owner = owner
        self._loop = loop
        self._pending: dict[int, PendingCall] = {}
        self._ids = itertools.count(1)
        self._given_up: dict[int, tuple[Peer, Any]] = {}
        """To whom they went, and what must stay until they are answered."""
        self._alarm_at = INFINITE
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def unanswered(self) -> int:
        """How many calls their callees may still be working on, or about to: those given up, too."""
        return len(self._pending) + len(self._given_up)

    @overload
    def open(
        self,
        peer: Peer,
        what: object,
        timeout: float,
        *,
        header: dict[str, Any] | None = None,
        how: str = "async",
    ) -> PendingCall: ...

    @overload
    def open(
        self,
        peer: Peer,
        what: object,
        timeout: float,
        kind: type[C],
        header: dict[str, Any] | None = None,
        how: str = "async",
    ) -> C: ...

    def open(
        self,
        peer: Peer,
        what: object,
        timeout: float,
        kind: type[PendingCall] = PendingCall,
        header: dict[str, Any] | None = None,
        how: str = "async",
    ) -> PendingCall:
        """Enter a call of a kind, so that its reply will be found.

        Args:
            header: of the message that will be sent; who listens to ``CallBegun`` may add to it.
            how: see ``CallBegun``.
        """
        call_id = next(self._ids)
        call = kind(self._owner, call_id, peer, what, timeout)
        events = self._events
        tell = events.call_begun
        if tell is not None or events.call_ended is not None:
            call.began = monotonic()
            call.when_ended = self.ended
            if tell is not None:
                tell(call_id, peer.name, name_of(what), what, how, header)
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
            tell = self._events.call_ended
            if tell is None:
                return
            error = outcome if isinstance(outcome, BaseException) else None
            header = outcome.header if isinstance(outcome, Frame) else None
            tell(call.call_id, call.peer.name, call.asked, monotonic() - call.began, error, header)

    def find(self, call_id: int) -> PendingCall | None:
        """A call under way; None if it has ended."""
        return self._pending.get(call_id)

    def take(self, call_id: int) -> PendingCall | None:
        """Remove a call; None if it has ended already. Who gets it must settle it."""
        return self._pending.pop(call_id, None)

    def answered(self, call_id: int, peer: Peer) -> PendingCall | None:
        """As ``take``, for the call that a worker has answered; ``ProtocolError`` if another got it."""
        call = self._pending.get(call_id)
        if call is not None and call.peer is not peer:
            raise ProtocolError(f"an answer to a call that worker '{call.peer.name}' got")
        call = self._pending.pop(call_id, None)
        if call is None:
            self._given_up.pop(call_id, None)
        return call

    def give_up(self, call: PendingCall) -> bool:
        """Remove a call whose time is over, or that nobody waits for any more; false if it has just ended.

        Until the callee has answered it, or is gone, it still counts as under way.
        """
        self._given_up[call.call_id] = call.peer, call.holds
        if self.take(call.call_id) is None:
            self._given_up.pop(call.call_id, None)
            return False
        if call.peer.lost is not None:
            self._given_up.pop(call.call_id, None)  # ``take_all`` may have been here before
        return True

    def peers(self) -> KeysView[Peer]:
        """All workers that have a call to answer, in the order in which they were first asked."""
        found = {call.peer: None for call in self.waiting()}
        found |= dict.fromkeys(peer for peer, _ in self._given_up.copy().values())
        return found.keys()

    def take_all(self, peer: Peer) -> list[PendingCall]:
        """Remove all calls to one worker that is gone."""
        for call_id in [call_id for call_id, (to, _) in self._given_up.copy().items() if to is peer]:
            self._given_up.pop(call_id, None)
        mine = [call.call_id for call in self.waiting() if call.peer is peer]
        return [call for call in map(self.take, mine) if call is not None]

    def lost(self, peer: Peer) -> None:
        """A worker is gone: end all calls to it."""
        unattended = [call for call in self.take_all(peer) if call.settle(call.lost_error())]
        self._complete(unattended)

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

    def _complete(self, unattended: Iterable[PendingCall]) -> None:
        """Have the futures of calls completed that nobody waits for."""
        futures = [call.future for call in unattended if call.future is not None]
        if futures:
            self._owner.complete_soon(*futures)

    def _look_soon(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all calls
            self._loop.call_soon_threadsafe(self.look)

    def look(self) -> None:
        """On the loop's thread: end the calls whose time is over, and set the alarm."""
        now = monotonic()
        earliest = INFINITE
        self._alarm_at = earliest
        unattended: list[PendingCall] = []
        for call in self.waiting():
            if not call.watched:
                continue  # a thread waits for it and looks at the clock
            if call.deadline > now:
                earliest = min(earliest, call.deadline)
            elif (call.keeps_place or self.give_up(call)) and call.expired():
                unattended.append(call)
        self._complete(unattended)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if earliest < INFINITE:
            self._alarm_at = min(self._alarm_at, earliest)
            self._timer = self._loop.call_later(max(0.0, earliest - now), self.look)

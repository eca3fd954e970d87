"""A call under way, at its caller: how it ends, and how a thread waits for that.

When a reply arrives, the loop only stores it here. A thread that waits for it reads the connection itself if
that is free; else it waits on a lock of its own, which Ctrl-C interrupts. Who waits decodes the reply; where
nobody does, see ``futures``.
"""

from __future__ import annotations

from _thread import LockType, allocate_lock
from collections.abc import Sized
from time import monotonic
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final, Protocol

from rpc.errors import ProtocolError, RpcTimeoutError, WorkerLostError
from rpc.group.peer import Peer
from rpc.runtime.blocking import INFINITE, check_may_block, wait_for
from rpc.serialization.serializer import Serializer
from rpc.transport.inline_read.reading import DirectReading
from rpc.transport.inline_read.role import Turn
from rpc.wire.frames import Frame, Kind

if TYPE_CHECKING:
    from rpc.agent.futures import Future

__all__ = ["CallOwner", "PendingCall"]

_REPLIES: Final = frozenset((Kind.REPLY, Kind.FAILURE))
_NAMED_CALLABLES: Final = (FunctionType, BuiltinFunctionType, MethodType, type)


class CallOwner(Protocol):
    """What a pending call needs from its agent."""

    @property
    def serializer(self) -> Serializer:
        """What replies are read with."""

    def decode(self, call: PendingCall, frame: Frame) -> Any:
        """The value in a reply; raises what a failure carries."""

    def answered(self, call: PendingCall) -> None:
        """A thread has received the reply itself."""

    def unattended(self, peer: Peer, frame: Frame) -> PendingCall | None:
        """The call that a frame of ``peer`` answers, if any thread that reads it may end that call."""

    def complete_soon(self, future: Future[Any]) -> None:
        """Have an executor thread call ``future.complete()``."""

    def expire(self, call: PendingCall) -> BaseException | None:
        """Give a call up because its time is over; None if its reply has just arrived."""

    def unwrap(self, peer: Peer, frame: Frame, taken: Sized) -> Frame:
        """The message that a frame stands for; see ``SharedMemory``."""


class PendingCall:
    """One call under way. ``settle`` is called once, by the loop or by whoever gives the call up.

    Attributes:
        call_id: names the call on the wire.
        peer: whom it was sent to.
        what: what was asked, for error messages.
        timeout: seconds that it may take, 0 for no limit.
        deadline: the same on the monotonic clock, infinite for no limit.
        arrivals: what travelled beside the reply's pickle, adopted when it arrived.
        future: the user's future, if there is one.
        holds: what must stay while the call is under way, such as a reference to the object that it is for.
        turn: at reading the connection, which the thread that will wait has claimed.
        sent: its message is on its way.
        watched: the loop ends it when its deadline passes; else the thread that waits does.
    """

    keeps_place = False
    """Whether a call stays in the table of calls when its time is over."""

    any_thread = False
    """Whether ``settle`` may be called on any thread, and more than once, while there is no future."""

    # What most calls never set; a call is made for every message, so its making is kept short.
    arrivals: Any = None
    future: Future[Any] | None = None
    holds: Any = None
    outcome: Frame | BaseException | None = None
    sent = False
    watched = False
    turn: Turn | None = None

    def __init__(self, owner: CallOwner, call_id: int, peer: Peer, what: object, timeout: float) -> None:
        self.owner = owner
        self.call_id = call_id
        self.peer = peer
        self.what = what
        self.timeout = timeout
        self.deadline = monotonic() + timeout if timeout else INFINITE
        self._waiters: list[LockType | DirectReading] = []

    @property
    def asked(self) -> str:
        """What was asked, for people; made without running code of the user's, such as a ``__repr__``."""
        what = self.what
        if isinstance(what, str):
            return what
        named = what if isinstance(what, _NAMED_CALLABLES) else type(what)
        return str(named.__qualname__)

    def timeout_error(self) -> RpcTimeoutError:
        """The error of this call when its time is over."""
        return RpcTimeoutError(
            f"RPC ran for more than its timeout of {self.timeout * 1000:.0f} ms: {self.asked} on worker "
            f"'{self.peer.name}' has not answered. Pass a larger timeout= (0 for none), or set_rpc_timeout()."
        )

    def lost_error(self) -> WorkerLostError:
        """The error of this call when its callee is gone."""
        return self.peer.lost_error(f"{self.asked} was not answered")

    def expired(self) -> bool:
        """The time is over: settle the call, and return what ``settle`` does."""
        return self.settle(self.timeout_error())

    def settle(self, outcome: Frame | BaseException) -> bool:
        """Store how the call ended and wake who waits.

        Returns:
            Whether nobody waits, so that the future, if there is one, must be completed by others.
        """
        self.outcome = outcome
        if not self._waiters:
            return True
        self._wake_waiters()
        return False

    def _wake_waiters(self) -> None:
        """Wake each thread that waits once, whoever calls this: several may, at the same time."""
        waiters = self._waiters
        while waiters:
            try:
                waiter = waiters.pop()
            except IndexError:
                return
            waiter.release()

    def _waits_no_more(self, waiter: LockType | DirectReading) -> None:
        try:
            self._waiters.remove(waiter)
        except ValueError:  # it has been woken
            return

    def abandon(self, error: BaseException) -> None:
        """End the call in a forked child, where no lock may be taken."""
        PendingCall.settle(self, error)

    def take_in(self, frames: list[Frame]) -> bool:
        """On the thread that waits, which has read these frames: store the reply, and end calls that any
        thread may end; false if there is anything else, which needs the loop.

        It may be repeated, since Ctrl-C may come anywhere.
        """
        if len(frames) == 1:
            kind, call_id, header, _ = frame = frames[0]
            if call_id == self.call_id and kind in _REPLIES and (not header or self.takes(header)):
                self.outcome = frame
                return True
        mine: Frame | None = None
        others: list[tuple[PendingCall, Frame]] = []
        for frame in frames:
            if self._is_reply(frame):
                mine = frame
                continue
            call = self.owner.unattended(self.peer, frame)
            if call is None:
                return False
            others.append((call, frame))
        for call, frame in others:
            call.settle(frame)
            if call.future is not None:  # made just now, on another thread
                self.owner.complete_soon(call.future)
            self.owner.answered(call)
        if mine is not None:
            self.outcome = mine
        return True

    def _is_reply(self, frame: Frame) -> bool:
        """Whether it is the reply to this call, with nothing in it that needs the loop."""
        kind, call_id, header, _ = frame
        return call_id == self.call_id and kind in _REPLIES and (not header or self.takes(header))

    def takes(self, header: dict[str, Any]) -> bool:
        """Whether the waiting thread may take a reply with this header: nothing in it needs the loop."""
        return self.owner.serializer.brings_nothing(header)

    def look(self, frame: Frame, taken: Sized) -> Frame | None:
        """The reply that a frame stands for, if there is one in memory shared with the callee."""
        try:
            reply = self.owner.unwrap(self.peer, frame, taken)
        except ProtocolError:  # the loop finds it, too, and knows what to do
            return None
        return reply if reply.kind in _REPLIES else None

    def settled(self) -> bool:
        """Whether the call has ended."""
        return self.outcome is not None

    def wait_settled(self) -> None:
        """Block until the call has ended. Raises ``KeyboardInterrupt`` at once on Ctrl-C."""
        if self.outcome is not None and self.turn is None:
            return
        check_may_block()
        if self.turn is None:  # else its message was not gathered with others
            self.peer.flush()
        if self._read_reply():
            return
        lock = allocate_lock()
        lock.acquire()
        try:
            self._waiters.append(lock)
            if self.settled():
                return
            if not wait_for(lock, INFINITE if self.watched else self.deadline):
                error = self.owner.expire(self)
                if error is not None:
                    self.outcome = error
                else:
                    wait_for(lock)
        except BaseException:
            self._waits_no_more(lock)
            if self.future is None:
                self.owner.expire(self)
            raise

    def _read_reply(self) -> bool:
        """Receive the reply on this thread, if the connection is free; returns whether it has ended."""
        connection = self.peer.connection
        direct = None if connection is None else connection.direct
        if direct is None or self.keeps_place:
            return False
        try:
            waiters = self._waiters
            waiters.append(direct)
            direct.read_reply(self, self.deadline, self.turn)
            self._waits_no_more(direct)
            if self.outcome is None:
                return False
            self.owner.answered(self)
            if waiters:
                self._wake_waiters()
            return True
        except BaseException:
            self._waits_no_more(direct)
            if self.outcome is not None:
                self._answered()
            elif self.future is None:
                self.owner.expire(self)
            raise

    def _answered(self) -> None:
        """This thread has received the reply: others may wait for the same."""
        self.owner.answered(self)
        if self._waiters:
            self._wake_waiters()

    def result(self) -> Any:
        """Wait, decode, and return the value or raise: for callers that need no future."""
        self.wait_settled()
        self.what = None  # a function of the user's, perhaps, which must not die with the loop's last look
        outcome = self.outcome
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None
        return self.owner.decode(self, outcome)

"""A call under way, at its caller: how it ends, and how a thread waits for that.

Whoever reads the reply only stores it here. A thread that waits for it reads the connection itself if that is
free; else it waits on a lock of its own. Who waits decodes the reply; where nobody does, see ``futures``.
"""

from __future__ import annotations

from _thread import LockType, allocate_lock
from collections.abc import Callable
from time import monotonic
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, Protocol

from rpc.errors import RpcTimeoutError, WorkerLostError
from rpc.group.peer import Peer
from rpc.runtime.blocking import INFINITE, check_may_block, wait_for
from rpc.runtime.interrupts import interruptible, protected
from rpc.transport.inline_read import InlineReader, Turn
from rpc.wire.frames import Frame

__all__ = ["CallOwner", "Completable", "PendingCall"]

_NAMED_CALLABLES: Final = (FunctionType, BuiltinFunctionType, MethodType, type)


class Completable(Protocol):
    """The future of a call."""

    def complete(self, _: object = None) -> None:
        """Decode the reply, which has arrived, and complete the future, unless somebody else has."""


class CallOwner(Protocol):
    """What a pending call needs from its agent."""

    def decode(self, call: PendingCall, frame: Frame) -> Any:
        """The value in a reply; raises what a failure carries."""

    def complete_soon(self, future: Any) -> None:
        """Have an executor thread call ``future.complete()``."""

    def expire(self, call: PendingCall) -> BaseException | None:
        """Give a call up because its time is over; None if its reply has just arrived."""


class PendingCall:
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
        sent: its message is on its way.
        watched: the loop ends it when its deadline passes; else the thread that waits does.
        claimed: what ``reserve`` has claimed.
        began, when_ended: where somebody listens to calls: when it was opened, and who is told of its end.
    """

    keeps_place = False
    """Whether a call stays in the table of calls when its time is over."""

    # What most calls never set; a call is made for every message, so its making is kept short.
    arrivals: Any = None
    future: Any = None
    holds: Any = None
    outcome: Frame | BaseException | None = None
    sent = False
    watched = False
    began = 0.0
    when_ended: Callable[[PendingCall, Frame | BaseException], None] | None = None
    claimed: tuple[InlineReader, Turn] | None = None

    def __init__(self, owner: CallOwner, call_id: int, peer: Peer, what: object, timeout: float) -> None:
        self.owner = owner
        self.call_id = call_id
        self.peer = peer
        self.what = what
        self.timeout = timeout
        self.deadline = monotonic() + timeout if timeout else INFINITE
        self._waiters: list[LockType | Turn] = []

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
        if self.when_ended is not None:
            self.when_ended(self, outcome)
        self.outcome = outcome
        waiters = self._waiters
        if not waiters:
            return True
        while waiters:
            try:
                waiter = waiters.pop()
            except IndexError:  # another thread wakes them too
                break
            waiter.release()
        return False

    def abandon(self, error: BaseException) -> None:
        """End the call in a forked child, where no lock may be taken."""
        PendingCall.settle(self, error)

    def settled(self) -> bool:
        """Whether the call has ended."""
        return self.outcome is not None

    # ---- waiting

    def reserve(self) -> None:
        """Claim the connection for the current thread, which will send the call and wait for it at once.

        It must call ``wait`` or ``release_reserved`` then.
        """
        connection = self.peer.connection
        if connection is not None and connection.reader is not None:
            turn = connection.reader.claim()
            if turn is not None:
                self.claimed = connection.reader, turn

    def release_reserved(self) -> None:
        """Give up what ``reserve`` has claimed."""
        claimed, self.claimed = self.claimed, None
        if claimed is not None and claimed[0].lease.holder() is claimed[1]:
            claimed[0].leave()

    def _reader(self) -> InlineReader | None:
        connection = self.peer.connection
        return None if connection is None or self.keeps_place else connection.reader

    @protected
    def wait(self) -> None:
        """Block until the call has ended. Raises ``KeyboardInterrupt`` at once on Ctrl-C."""
        if self.outcome is not None and self.claimed is None:
            return
        check_may_block()
        try:
            if self.claimed is None:  # else its message was not coalesced with others
                self.peer.flush()
            if self._wait_inline():
                return
            self._wait_asleep()
        except BaseException:
            if self.outcome is None and self.future is None:
                self.owner.expire(self)
            raise

    def _wait_inline(self) -> bool:
        """Wait by reading the connection on this thread, if it may; returns whether the call has ended."""
        claimed, self.claimed = self.claimed, None
        if claimed is None:
            reader = self._reader()
            turn = None if reader is None or self.outcome is not None else reader.claim()
            if reader is None or turn is None:
                return self.outcome is not None
        else:
            reader, turn = claimed  # also where the connection is the peer's no more
        self._waiters.append(turn)
        reader.wait_for(self, self.deadline, turn)
        if self._waiters:
            self._waits_no_more(turn)
        return self.outcome is not None

    def _wait_asleep(self) -> None:
        lock = allocate_lock()
        lock.acquire()
        self._waiters.append(lock)
        try:
            if self.outcome is not None:
                return
            if not wait_for(lock, INFINITE if self.watched else self.deadline):
                error = self.owner.expire(self)
                if error is not None:
                    self.outcome = error
                else:
                    wait_for(lock)
        finally:
            self._waits_no_more(lock)

    def _waits_no_more(self, waiter: LockType | Turn) -> None:
        try:
            self._waiters.remove(waiter)
        except ValueError:  # it has been woken
            return

    @interruptible  # decoding may take long
    def result(self) -> Any:
        """Wait, decode, and return the value or raise: for callers that need no future."""
        if self.outcome is None:
            self.wait()
        self.what = None  # a function of the user's, perhaps, which must not die where it is settled
        outcome = self.outcome
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None
        return self.owner.decode(self, outcome)

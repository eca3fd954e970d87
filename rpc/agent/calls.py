"""Calls at their caller: how they are made, how threads wait for them, how they end, and the table of all.

A call is serialized on the caller's thread, entered into the table of calls, and sent (``dispatcher``). They
begin in ``Caller.request``, or in ``inquire`` if the thread waits for the answer at once; creations and parts
of a backward, which are calls as well, open the table themselves, and begin in ``transmit``. At the callee,
``received_requests`` runs them.

The thread that reads a reply only stores it in the call. A thread that waits for it reads the connection
itself if no other does; otherwise it waits on a lock of its own. The waiting thread decodes the reply; if no
thread waits, see ``futures``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable, KeysView, Sequence
from concurrent.futures import CancelledError
from functools import partial
from threading import TIMEOUT_MAX
from time import monotonic
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, TypeVar

from torch import Tensor, is_grad_enabled

from rpc.agent.activity import Activity
from rpc.agent.border import Border
from rpc.agent.dispatcher import Dispatcher, Sender
from rpc.agent.tape import Tracing, note
from rpc.errors import (
    BlockingCallError,
    MessageLostError,
    NotInitializedError,
    ProtocolError,
    RpcTimeoutError,
    WorkerLostError,
)
from rpc.group.membership import WorkerReference
from rpc.group.peer import Peer, PeerTable
from rpc.options import UNSET_TIMEOUT
from rpc.runtime import interrupts
from rpc.runtime.blocking import INFINITE, this_thread
from rpc.runtime.code_folders import OURS
from rpc.runtime.events import Events
from rpc.runtime.interrupts import interruptible, is_interruption, protected
from rpc.runtime.tasks import COMPLETION, Task
from rpc.serialization.exception_state import twin
from rpc.serialization.payload import Connect, Payload
from rpc.serialization.serializer import Serializer
from rpc.serialization.tracked import stand_ins
from rpc.transport.base import QueueFull
from rpc.transport.inline_read import Awaited, Turn
from rpc.wire.frames import Frame, Kind

__all__ = ["CANCEL", "CallTable", "Caller", "PendingCall", "name_of"]

C = TypeVar("C", bound="PendingCall")

CANCEL: Final = "cancel"
"""Topic of control messages with the id of a call that its caller cancels."""

_FEW: Final = 16
"""Number of calls under way above which throughput matters more than latency."""

_NAMED_CALLABLES: Final = (FunctionType, BuiltinFunctionType, MethodType, type)


def name_of(what: object) -> str:
    """Describe what a worker is asked, without running user code such as a ``__repr__``.

    Args:
        what: a function, or a description.
    """
    if type(what) is FunctionType:
        return what.__qualname__
    if isinstance(what, str):
        return what
    if type(what) is BuiltinFunctionType and what.__module__ not in (None, "builtins"):
        return f"{what.__module__}.{what.__name__}"  # its qualified name is an internal name of PyTorch
    named = what if isinstance(what, _NAMED_CALLABLES) else type(what)
    return str(named.__qualname__)


class Caller:
    """Makes the calls of one agent, from any thread.

    Args:
        rpc_timeout: default timeout in seconds; 0 for none.
        table: the calls under way.
        peers: the workers.
        sender: sends the messages.

    Attributes:
        rpc_timeout: as given, or set since by ``set_rpc_timeout``.
    """

    def __init__(
        self,
        rpc_timeout: float,
        table: CallTable,
        peers: PeerTable,
        sender: Sender,
        serializer: Serializer,
        tracing: Tracing,
        events: Events,
    ) -> None:
        self.rpc_timeout = rpc_timeout
        self._table = table
        self._peers = peers
        self._sender = sender
        self._serializer = serializer
        self._tracing = tracing
        self._events = events

    @protected  # objects beside the payload are either sent or taken back
    def call(
        self,
        to: WorkerReference,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        *,
        coalesce: bool = False,
    ) -> PendingCall:
        """Send a call of a function; raises if it cannot be sent.

        Args:
            timeout: timeout in seconds; 0 for none, ``UNSET_TIMEOUT`` for the default.
            coalesce: see ``request``.
        """
        peer = self._peers.find(to)
        payload = self.dump_call(function, args, kwargs, peer)
        return self.request(peer, Kind.CALL, payload, timeout, function, coalesce=coalesce)

    @protected
    def request(
        self,
        peer: Peer,
        kind: int,
        payload: Payload,
        timeout: float,
        what: object,
        *,
        coalesce: bool = False,
    ) -> PendingCall:
        """Send any message that is answered by a reply or a failure.

        If the worker is gone, the call fails with ``WorkerLostError``.

        Args:
            what: describes it for error messages.
            coalesce: no thread waits for it yet; see ``CallTable.open``.
        """
        if not interrupts.are_wrapped:
            interrupts.ensure_deferred()
        timeout = self.rpc_timeout if timeout is UNSET_TIMEOUT else self._checked(timeout, payload, peer)
        call = self._table.open(peer, what, timeout, PendingCall, payload.header, coalesce=coalesce)
        self.transmit(call, kind, payload)
        return call

    @protected
    def inquire(self, peer: Peer, kind: int, payload: Payload, timeout: float, what: object) -> Any:
        """Like ``request``, but wait for the answer, and return its value or raise its error.

        Raises:
            BlockingCallError: the thread must not block; nothing is sent.
        """
        if this_thread.must_not_block is not None:
            self._serializer.take_back(payload.header, peer)
            raise BlockingCallError(this_thread.must_not_block)
        timeout = self.rpc_timeout if timeout is UNSET_TIMEOUT else self._checked(timeout, payload, peer)
        call = self._table.open(peer, what, timeout, PendingCall, payload.header, how="sync")
        # The thread reads from now on, since the answer may come at once; but sending much data takes long,
        # and the loop reads meanwhile.
        reader = peer.reader
        turn = None if reader is None or len(payload.buffers) > 1 else reader.claim()
        try:
            self.transmit(call, kind, payload)
            call.wait(turn)
        finally:
            if turn is not None and turn.left_to_loop is None:  # it was not used
                turn.reader.leave()
        return call.result()

    def _checked(self, timeout: float, payload: Payload, peer: Peer) -> float:
        """Return the timeout of a call; if that is none, take back the objects beside its payload."""
        try:
            return self.effective_timeout(timeout)
        except BaseException:
            self._serializer.take_back(payload.header, peer)
            raise

    def transmit(self, call: PendingCall, kind: int, payload: Payload) -> None:
        """Send the message of a call that is in the table; see ``request``."""
        try:
            wait = call.timeout or INFINITE
            if payload.staging is not None and not call.keeps_place:
                payload.staging.is_wanted = partial(self._table.is_wanted, call)
            self._sender.send(call.peer, kind, call.call_id, payload, wait=wait, coalesce=call.coalesced)
        except BaseException as error:
            if is_interruption(error):  # even if it is an error of another call, made by a signal handler
                pass
            elif isinstance(error, QueueFull):
                if self._table.drop(call):
                    call.settle(call.timeout_error())
                return
            elif isinstance(error, WorkerLostError):
                # If the loop has not recorded why the connection is closed, it is about to, and ends the call
                # then.
                if call.peer.lost is not None and self._table.drop(call):
                    call.settle(call.lost_error())
                return
            self._table.drop(call)
            self._table.ended(call, error)
            raise

    def dump_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], peer: Peer
    ) -> Payload:
        """Return the message of a call, and the tape's recording of it."""
        tell = self._events.call_serialized
        began = 0.0 if tell is None else monotonic()
        tape = self._tracing.tape
        recording = None if tape is None or tape.current() is None else tape.calling(peer)
        if tape is None or recording is None:
            payload: Payload = peer.codec.dump_call(function, args, kwargs, peer)
        else:
            tensors: list[Tensor] = []
            if recording.tracks:
                args, kwargs = stand_ins(args, kwargs)
            payload = peer.codec.dump_call(function, args, kwargs, peer, tracked=tensors)
            note(tape, recording, tensors, payload.header, peer, self._serializer)
        if tell is not None:
            tell(peer.name, function, monotonic() - began, sum(map(len, payload.buffers)))
        return payload

    def attach(self, header: dict[str, Any], peer: Peer) -> None:
        """Let the tape add to the header of a request without arguments."""
        tape = self._tracing.tape
        recording = None if tape is None or tape.current() is None else tape.calling(peer)
        if tape is not None and recording is not None:
            note(tape, recording, [], header, peer, self._serializer)

    def effective_timeout(self, timeout: float) -> float:
        """Return the timeout that the user gave, or the default; ``TypeError`` or ``ValueError`` if it is not
        a number of seconds.
        """
        try:
            if timeout == UNSET_TIMEOUT:
                return self.rpc_timeout
            if 0 <= timeout <= TIMEOUT_MAX:
                return timeout
            if timeout > TIMEOUT_MAX:
                return 0.0
        except TypeError:
            given = f"{type(timeout).__name__} {timeout!r:.60}"
            raise TypeError(f"a timeout is a number of seconds, 0 for none, not {given}") from None
        raise ValueError(f"a timeout is a number of seconds, 0 for none, not {timeout}")


class PendingCall:
    """One call under way. ``settle`` is called once, by the thread that reads its reply or gives it up.

    Attributes:
        table: the table of calls that it is, or was, in.
        awaited: its outcome, and the threads that wait for it.
        call_id: id of the call in messages.
        peer: the worker that it was sent to.
        what: what was asked, for error messages.
        timeout: timeout in seconds, 0 for no limit.
        deadline: the same on the monotonic clock, infinite for no limit.
        arrivals: objects beside the reply's pickle, adopted when it arrived.
        future: the user's future, if there is one.
        holds: object that must live while the call is under way, such as a reference to the object that it
        uses.
        watched: whether the loop ends it at its deadline; otherwise the waiting thread does.
        coalesced: whether its message may still wait for others.
        wants_graph: whether to log a warning if its answer was computed from tensors that require grad and
            has no history. False for calls made under ``no_grad``, and for those that callees make: the
            program that has called them decides whether there is a context.
        last_seen: what its callee did when it was last asked, as text; "" if it was not asked.
        in_cycle: whether it waited for itself then, along a chain of calls.
        how: see ``CallBegun``; "map" if ``rpc.map`` has made it.
        began, when_ended: if there are listeners for calls: when it was opened, and the handlers for its end.
    """

    keeps_place = False
    """Whether a call stays in the table of calls when its timeout expires; it cannot be cancelled then."""

    # Attributes that most calls never set are class attributes, as a call is made for every message.
    arrivals: Any = None
    future: Any = None
    holds: Any = None
    watched = False
    last_seen = ""
    in_cycle = False
    how = "async"
    began = 0.0
    when_ended: Callable[[PendingCall, Frame | BaseException], None] | None = None
    coalesced = False
    wants_graph = True

    def __init__(self, table: CallTable, call_id: int, peer: Peer, what: object, timeout: float) -> None:
        self.table = table
        self.call_id = call_id
        self.peer = peer
        self.what = what
        self.timeout = timeout
        self.deadline = monotonic() + timeout if timeout else INFINITE
        self.awaited = Awaited()

    @property
    def outcome(self) -> Frame | BaseException | None:
        """Its reply, or the error that it failed with; None while it is under way."""
        found: Frame | BaseException | None = self.awaited.outcome
        return found

    def done(self) -> bool:
        """Whether it has ended."""
        return self.awaited.outcome is not None

    @property
    def asked(self) -> str:
        """Description of what was asked; see ``name_of``."""
        return name_of(self.what)

    def timeout_error(self) -> RpcTimeoutError:
        """Return the error of this call when its timeout has expired."""
        seen = f" {self.last_seen}." if self.last_seen else ""
        function = f"rpc_{self.how}" if self.how in ("sync", "async") else self.how
        if type(self.what) is FunctionType and self.what.__code__.co_filename.startswith(OURS):
            without = ""  # the program has called another function
        elif self.asked == "RRef.to_here":
            without = "rref.to_here(timeout=0)"
        elif self.asked.startswith(("method '", "the type of ")):  # of the object of a reference
            without = f"rref.{function}(timeout=0).method(...)"
        else:
            called = "" if self.how == "map" else f"'{self.peer.name}', {self.asked}, "
            without = f"rpc.{function}({called}..., timeout=0)"
        passed = f"pass a timeout in seconds: {without} has no limit, and " if without else ""
        limit = "none" if without else "no limit"
        advice = f" If it may take longer, {passed}rpc.set_rpc_timeout(0) sets {limit} for all calls."
        return RpcTimeoutError(
            f"RPC ran for more than its timeout of {self.timeout * 1000:.0f} ms: {self.asked} on worker "
            f"'{self.peer.name}' has not answered.{seen}{'' if self.in_cycle else advice}"
        )

    def lost_error(self) -> WorkerLostError:
        """Return the error of this call when its callee is gone."""
        return self.peer.lost_error(f"{self.asked} was not answered")

    def expired(self) -> bool:
        """Settle the call because its timeout has expired; returns the result of ``settle``."""
        return self.settle(self.timeout_error())

    def settle(self, outcome: Frame | BaseException) -> bool:
        """Store the outcome and wake the waiting threads.

        Returns whether there are none, so that the future, if there is one, must be completed by another
        thread.
        """
        if self.when_ended is not None:
            self.when_ended(self, outcome)
        return not self.awaited.settle(outcome)

    def abandon(self, error: BaseException) -> None:
        """End the call in a forked child, where no lock may be taken."""
        PendingCall.settle(self, error)

    # ---- waiting

    @protected
    def wait(self, turn: Turn | None = None) -> None:
        """Block until the call has ended. ``KeyboardInterrupt`` is raised at once.

        Args:
            turn: the turn at reading that this thread has claimed for its answer, if it has. If the
                turn has not ended afterwards, it must be given up.
        """
        if self.awaited.outcome is not None:
            return
        if this_thread.must_not_block is not None:
            raise BlockingCallError(this_thread.must_not_block)
        awaited = self.awaited
        try:
            if turn is not None:
                turn.reader.wait_for(awaited, self.deadline, turn)
            else:
                if self.coalesced:
                    self.peer.flush()
                self.peer.wait(awaited, self.deadline, reads=not self.keeps_place)
            if awaited.outcome is None and not awaited.sleep(INFINITE if self.watched else self.deadline):
                error = self.table.expire(self)
                if error is not None:
                    awaited.outcome = error
                else:
                    awaited.sleep(INFINITE)  # its reply has just arrived
        except BaseException:
            if awaited.outcome is None and self.future is None:
                self.table.expire(self)
            raise

    @interruptible  # decoding may take long
    def result(self) -> Any:
        """Wait, decode, and return the value or raise the error."""
        if self.awaited.outcome is None:
            self.wait()
        self.what = None  # may be the user's function, which must not be destroyed where it is settled
        outcome = self.awaited.outcome
        if isinstance(outcome, BaseException):
            raise twin(outcome)  # a copy: frames that it passes refer to this call, a cycle
        return self.table.decode(self, outcome)


def _as_leaves(tensors: list[Tensor]) -> list[Tensor]:
    """Return leaves for the tensors of an answer whose gradients are not needed; see ``Connect``."""
    return [tensor.requires_grad_() for tensor in tensors]


class CallTable:
    """All calls of one agent that have no reply yet. From any thread, except ``look``.

    Calls usually end long before their deadline, so no timer is kept per call: there is one timer, no later
    than the earliest deadline, and when it fires the loop checks the table and sets it anew. A blocking call
    needs no timer: the waiting thread checks the clock itself.

    Args:
        loop: runs the timer.
        serializer: reads replies.
        tracing: the tape, which records what replies bring.
        events: the agent's events, for calls that begin and end.
        activity: is notified of calls that end without an answer.
        post: sends a control message; see ``Control.post``.
        run_soon: has tasks run on executor threads.

    Attributes:
        opened: number of calls that were ever entered; of several simultaneous ones, some may be counted
        late.
        run_soon: as given.
        border: what is done where answers come in.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        serializer: Serializer,
        tracing: Tracing,
        events: Events,
        activity: Activity,
        post: Callable[[Peer, str, object], object],
        run_soon: Callable[[Sequence[Task]], object],
    ) -> None:
        self.opened = 0
        self.border = Border()
        self._loop = loop
        self._serializer = serializer
        self._tracing = tracing
        self._events = events
        self._activity = activity
        self._post = post
        self.run_soon = run_soon
        self._pending: dict[int, PendingCall] = {}
        self._ids = itertools.count(1)
        self._given_up: dict[int, tuple[Peer, Any]] = {}
        """Calls that were given up: their callee, and the object that must live until they are answered."""
        self._alarm_at = INFINITE
        self._timer: asyncio.TimerHandle | None = None

    def register(self, dispatcher: Dispatcher, sender: Sender) -> None:
        """Register the handlers of answers, and of requests that do not arrive."""
        dispatcher.on(Kind.REPLY, self.received, any_thread=True)
        dispatcher.on(Kind.FAILURE, self.received, any_thread=True)
        dispatcher.on_lost((None,), self.request_lost)
        dispatcher.on_failed((Kind.REPLY, Kind.FAILURE), self.request_unsent)
        sender.on_unsent((None,), self.request_unsent)

    def __len__(self) -> int:
        return len(self._pending)

    def unanswered(self) -> int:
        """Number of calls that their callees may still be working on, or about to, including those
        given up.
        """
        return len(self._pending) + len(self._given_up)

    def open(
        self,
        peer: Peer,
        what: object,
        timeout: float,
        kind: type[C],
        header: dict[str, Any] | None = None,
        how: str = "async",
        coalesce: bool = False,
    ) -> C:
        """Enter a call of a kind, so that its reply will be found.

        Args:
            header: header of the message to be sent; listeners of ``CallBegun`` may add to it.
            how: see ``CallBegun``.
            coalesce: whether its message may be sent together with the following, if many calls are under
                way.
        """
        call_id = next(self._ids)
        call = kind(self, call_id, peer, what, timeout)
        call.how = how
        if this_thread.runs_callees or not is_grad_enabled():
            call.wants_graph = False
        if coalesce and len(self._pending) > _FEW:
            call.coalesced = True
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
        """Have the loop end this call at its deadline."""
        try:
            call.watched = True
            if call.deadline < self._alarm_at:
                self._alarm_at = call.deadline
                self._look_soon()
        except BaseException:  # KeyboardInterrupt: the loop may or may not have been notified
            self._alarm_at = INFINITE
            self._look_soon()
            raise

    def ended(self, call: PendingCall, outcome: Frame | BaseException) -> None:
        """Report the end of a call to listeners, once, if its beginning was reported."""
        if call.when_ended is not None:
            call.when_ended = None
            tell = self._events.call_ended
            if tell is None:
                return
            error = outcome if isinstance(outcome, BaseException) else None
            header = outcome.header if isinstance(outcome, Frame) else None
            tell(call.call_id, call.peer.name, call.asked, monotonic() - call.began, error, header)

    def find(self, call_id: int) -> PendingCall | None:
        """Return a call under way; None if it has ended."""
        return self._pending.get(call_id)

    def take(self, call_id: int) -> PendingCall | None:
        """Remove a call; None if it has ended already. The caller of this must settle it."""
        return self._pending.pop(call_id, None)

    def drop(self, call: PendingCall) -> bool:
        """Like ``take``, for a call that will not be answered; returns whether it had not ended."""
        dropped = self.take(call.call_id) is not None
        self._activity.ended()
        return dropped

    def give_up(self, call: PendingCall) -> bool:
        """Remove a call whose timeout has expired, or that is no longer wanted; false if it has just ended.

        Until the callee has answered it, or is gone, it still counts as under way.
        """
        self._given_up[call.call_id] = call.peer, call.holds
        if self.take(call.call_id) is None:
            self._given_up.pop(call.call_id, None)
            return False
        if call.peer.lost is not None:
            self._given_up.pop(call.call_id, None)  # ``take_all`` may have run before
        return True

    def is_wanted(self, call: PendingCall) -> bool:
        """Whether a call whose message is not sent yet is still wanted. If not, it is no longer under way, as
        the message is not sent.
        """
        if call.call_id in self._pending:
            return True
        self._given_up.pop(call.call_id, None)
        return False

    def peers(self) -> KeysView[Peer]:
        """Return all workers with unanswered calls, in the order in which they were first called."""
        found = {call.peer: None for call in self.waiting()}
        found |= dict.fromkeys(peer for peer, _ in self._given_up.copy().values())
        return found.keys()

    def take_all(self, peer: Peer) -> list[PendingCall]:
        """Remove all calls to a worker that is gone."""
        for call_id in [call_id for call_id, (to, _) in self._given_up.copy().items() if to is peer]:
            self._given_up.pop(call_id, None)
        mine = [call.call_id for call in self.waiting() if call.peer is peer]
        return [call for call in map(self.take, mine) if call is not None]

    def lost(self, peer: Peer) -> None:
        """End all calls to a worker that is gone."""
        unattended = [call for call in self.take_all(peer) if call.settle(call.lost_error())]
        self._complete(unattended)

    def expire(self, call: PendingCall) -> BaseException | None:
        """Give a call up because its timeout has expired; None if its reply has just arrived."""
        given_up = self.give_up(call)
        self._activity.ended()  # in case its callee is gone, or its answer has just arrived
        if not given_up:
            return None
        error = call.timeout_error()
        self.ended(call, error)
        return error

    def cancel(self, call: PendingCall) -> bool:
        """End a call that is no longer wanted, and notify its callee; false if it has ended."""
        if call.keeps_place or not self.give_up(call):
            return False
        self._post(call.peer, CANCEL, call.call_id)
        cancelled = f"{call.asked} on worker '{call.peer.name}' was cancelled by its caller"
        call.settle(CancelledError(cancelled))
        self._activity.ended()
        return True

    def end(self) -> None:
        """End all calls, because the agent ends."""
        with contextlib.ExitStack() as all_of_them:  # even if the callbacks of one raise
            for call in self.waiting():
                all_of_them.callback(self._end, call)

    def _end(self, call: PendingCall) -> None:
        if self.take(call.call_id) is not None:
            asked = f"{call.asked} on worker '{call.peer.name}'"
            error = NotInitializedError(f"RPC has been shut down: {asked} was not answered before")
            if call.settle(error) and call.future is not None:
                call.future.complete()

    def waiting(self) -> Iterable[PendingCall]:
        """Return all calls under way."""
        return self._pending.copy().values()

    def _complete(self, unattended: Iterable[PendingCall]) -> None:
        """Have the futures of calls without waiting threads completed."""
        self.complete_soon(*(call.future for call in unattended if call.future is not None))

    def complete_soon(self, *futures: Any) -> None:
        """Have an executor thread call ``complete`` of some futures."""
        if futures:
            self.run_soon([(future.complete, COMPLETION) for future in futures])

    def _look_soon(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all calls with it
            self._loop.call_soon_threadsafe(self.look)

    def look(self) -> None:
        """End the calls whose timeout has expired, and set the timer. On the loop's thread."""
        now = monotonic()
        earliest = INFINITE
        self._alarm_at = earliest
        unattended: list[PendingCall] = []
        for call in self.waiting():
            if not call.watched:
                continue  # a waiting thread checks the clock
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

    # ---- answers

    def received(self, peer: Peer, frame: Frame) -> Task | None:
        """Handle a frame of kind ``REPLY`` or ``FAILURE``; ``ProtocolError`` if it answers a call to another
        worker.
        """
        call_id = frame[1]
        call = self._pending.get(call_id)
        if call is not None and call.peer is not peer:
            raise ProtocolError(f"an answer to a call that worker '{call.peer.name}' got")
        serializer = self._serializer
        arrivals = None if serializer.brings_nothing(frame[2]) else serializer.adopt(frame[2], peer)
        call = self._pending.pop(call_id, None)  # as in ``_take_from``
        if call is None:
            self._given_up.pop(call_id, None)
            return None
        if arrivals is not None:
            call.arrivals = arrivals
        if call.settle(frame) and call.future is not None:
            return call.future.complete, COMPLETION
        return None

    def request_unsent(self, peer: Peer, call_id: int, error: BaseException) -> None:
        """Handle that a request that was to be sent later could not be sent, or that an answer could not be
        taken: see ``Sender.on_unsent`` and ``Dispatcher.on_failed``.
        """
        call = self._take_from(peer, call_id)
        if call is None:
            return
        if isinstance(error, QueueFull):
            error = call.timeout_error()
        if call.settle(error):
            self._complete((call,))

    def request_lost(self, peer: Peer, call_id: int, what: str) -> None:
        """Handle that a large request has not arrived, so it does not run: see ``Dispatcher.on_lost``."""
        call = self._take_from(peer, call_id)
        error = MessageLostError(f"the call did not run: {what}. It can be made again", peer.name)
        if call is not None and call.settle(error):
            self._complete((call,))

    def _take_from(self, peer: Peer, call_id: int) -> PendingCall | None:
        """Remove a call to a worker; ``ProtocolError`` if it went to another one."""
        call = self._pending.get(call_id)
        if call is not None and call.peer is not peer:
            raise ProtocolError(f"an answer to a call that worker '{call.peer.name}' got")
        call = self._pending.pop(call_id, None)  # another thread may have taken it
        if call is None:
            self._given_up.pop(call_id, None)
        return call

    def decode(self, call: PendingCall, frame: Frame) -> Any:
        """Return the value in a reply; raises the error in a failure."""
        kind, _, header, buffers, codec = frame
        if self.border.encloses:
            self.border.catch_up()
        if kind == Kind.FAILURE:
            raise self._serializer.load_exception(header, buffers, call.arrivals, call.peer, codec=codec)
        connect: Connect | None = None if call.wants_graph else _as_leaves
        if header:
            recording = self._tracing.recording_of(header, call.peer, answer=True)
            connect = connect if recording is None else recording.connect
        return self._serializer.codecs[codec].loads(
            header, buffers, call.arrivals, call.peer, connect=connect
        )

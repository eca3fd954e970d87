"""The caller's side: make a call of a function and its arguments, send it, and wait.

A call is serialized on the caller's thread, entered into the table of calls, and sent (``dispatcher``). All
calls begin in ``request``, or in ``inquire`` if the thread waits for the answer at once. ``calls`` handles
their outcome, ``request_runner`` runs them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from threading import TIMEOUT_MAX
from time import monotonic
from typing import Any, Final

from torch import Tensor, is_grad_enabled

from rpc.agent.activity import Activity
from rpc.agent.calls import CallTable, PendingCall
from rpc.agent.dispatcher import Dispatcher, Sender
from rpc.agent.futures import Future
from rpc.agent.ports import CANCEL, SendMessage
from rpc.agent.tape import Tracing, note
from rpc.errors import MessageLostError, WorkerLostError
from rpc.group.membership import WorkerReference
from rpc.group.peer import Peer
from rpc.runtime.blocking import this_thread
from rpc.runtime.events import Events, Tell
from rpc.runtime.interrupts import ensure_deferred, is_interruption, protected
from rpc.runtime.tasks import COMPLETION, Task
from rpc.serialization.payload import Connect, Payload
from rpc.serialization.serializer import Serializer
from rpc.serialization.tracked import stand_ins
from rpc.transport.base import INFINITE, QueueFull
from rpc.wire.frames import Frame, Kind

__all__ = ["UNSET_TIMEOUT", "Caller"]

UNSET_TIMEOUT: Final = -1.0
"""Value of a call's timeout that means the agent's default."""

_FEW: Final = 16
"""Number of calls under way above which throughput matters more than latency."""


def _as_leaves(tensors: list[Tensor]) -> list[Tensor]:
    """Return leaves for the tensors of an answer whose gradients are not needed; see ``Connect``."""
    return [tensor.requires_grad_() for tensor in tensors]


class Caller:
    """Makes the calls of one agent, from any thread. It is the ``CallOwner`` of all calls.

    Args:
        rpc_timeout: default timeout in seconds; 0 for none.
        find: returns the peer for a callee.
        send: sends a message; see ``Sender.send``.
        post: sends a control message; see ``Control.post``.
        run_soon: has tasks run on executor threads.

    Attributes:
        table: the calls under way.
        rpc_timeout: as given, or set since by ``set_rpc_timeout``.
    """

    def __init__(
        self,
        rpc_timeout: float,
        loop: asyncio.AbstractEventLoop,
        serializer: Serializer,
        tracing: Tracing,
        events: Events,
        activity: Activity,
        *,
        find: Callable[[WorkerReference], Peer],
        send: SendMessage,
        post: Callable[[Peer, str, object], object],
        run_soon: Callable[[Sequence[Task]], object],
    ) -> None:
        self.rpc_timeout = rpc_timeout
        self.table = CallTable(self, loop, events)
        self._serializer = serializer
        self._adopt = serializer.adopt
        self._tracing = tracing
        self._events = events
        self._activity = activity
        self._find = find
        self._send = send
        self._post = post
        self._run_soon = run_soon

    def register(self, dispatcher: Dispatcher, sender: Sender) -> None:
        """Register the handlers of answers, and of requests that do not arrive."""
        dispatcher.on(Kind.REPLY, self.received, any_thread=True)
        dispatcher.on(Kind.FAILURE, self.received, any_thread=True)
        dispatcher.on_lost((None,), self.request_lost)
        dispatcher.on_failed((Kind.REPLY, Kind.FAILURE), self.request_unsent)
        sender.on_unsent((None,), self.request_unsent)

    def set_timeout(self, seconds: float) -> None:
        """Set the default timeout of calls."""
        self.rpc_timeout = seconds

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
            coalesce: no thread waits for it yet: if many calls are under way, it may be sent together with
            the following.
        """
        peer = self._find(to)
        payload = self.dump_call(function, args, kwargs, peer)
        coalesce = coalesce and len(self.table) > _FEW
        return self.request(peer, Kind.CALL, payload, timeout, function, coalesce=coalesce)

    @protected
    def ask(
        self,
        to: WorkerReference,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> Any:
        """Send a call of a function, wait, and return its value or raise its error; arguments are as for
        ``call``.
        """
        peer = self._find(to)
        payload = self.dump_call(function, args, kwargs, peer)
        return self.inquire(peer, Kind.CALL, payload, timeout, function)

    def call_async(self, *call: Any) -> Future[Any]:
        """Like ``call``, but return a future."""
        return self.future(self.call(*call, coalesce=True))

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
        """Send any message that is answered by a reply or a failure; ``what`` describes it for error
        messages.

        If the worker is gone, the call fails with ``WorkerLostError``.
        """
        ensure_deferred()
        call = self._begin(peer, payload, timeout, what, "async")
        call.coalesced = coalesce
        self.transmit(call, kind, payload)
        return call

    @protected
    def inquire(self, peer: Peer, kind: int, payload: Payload, timeout: float, what: object) -> Any:
        """Like ``request``, but wait for the answer, and return its value or raise its error."""
        call = self._begin(peer, payload, timeout, what, "sync")
        if len(payload.buffers) <= 1:  # sending much data takes long, and the loop reads meanwhile
            peer.stand_by(call)
        try:
            self.transmit(call, kind, payload)
            call.wait()
        finally:
            if call.claimed is not None:
                peer.stand_down(call)
        return call.result()

    def _begin(self, peer: Peer, payload: Payload, timeout: float, what: object, how: str) -> PendingCall:
        """Enter a call into the table."""
        if timeout is UNSET_TIMEOUT:
            timeout = self.rpc_timeout
        else:
            try:
                timeout = self.effective_timeout(timeout)
            except BaseException:
                self._serializer.take_back(payload.header, peer)
                raise
        call = self.table.open(peer, what, timeout, header=payload.header, how=how)
        if this_thread.runs_callees or not is_grad_enabled():
            call.wants_graph = False
        return call

    def transmit(self, call: PendingCall, kind: int, payload: Payload) -> None:
        """Send the message of a call that is in the table; see ``request``."""
        try:
            wait = call.timeout or INFINITE
            if payload.staging is not None and not call.keeps_place:
                payload.staging.is_wanted = partial(self.table.is_wanted, call)
            self._send(call.peer, kind, call.call_id, payload, wait=wait, coalesce=call.coalesced)
        except BaseException as error:
            if is_interruption(error):  # even if it is an error of another call, made by a signal handler
                pass
            elif isinstance(error, QueueFull):
                if self.drop(call):
                    call.settle(call.timeout_error())
                return
            elif isinstance(error, WorkerLostError):
                # If the loop has not recorded why the connection is closed, it is about to, and ends the call
                # then.
                if call.peer.lost is not None and self.drop(call):
                    call.settle(call.lost_error())
                return
            self.drop(call)
            self.table.ended(call, error)
            raise

    def drop(self, call: PendingCall) -> bool:
        """Remove and settle a call that will not be answered; false if it has ended already."""
        dropped = self.table.take(call.call_id) is not None
        self._activity.ended()
        return dropped

    def dump_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], peer: Peer
    ) -> Payload:
        """Return the message of a call, and the tape's recording of it."""
        tell = self._events.call_serialized
        if tell is not None:
            return self._dump_told(function, args, kwargs, peer, tell)
        return self._dump_call(function, args, kwargs, peer)

    def _dump_told(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        peer: Peer,
        tell: Tell,
    ) -> Payload:
        began = monotonic()
        payload = self._dump_call(function, args, kwargs, peer)
        tell(peer.name, function, monotonic() - began, sum(map(len, payload.buffers)))
        return payload

    def _dump_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], peer: Peer
    ) -> Payload:
        tape = self._tracing.tape
        recording = None if tape is None or tape.current() is None else tape.calling(peer)
        if tape is None or recording is None:
            payload: Payload = peer.codec.dump_call(function, args, kwargs, peer)
            return payload
        tensors: list[Tensor] = []
        if recording.tracks:
            args, kwargs = stand_ins(args, kwargs)
        payload = peer.codec.dump_call(function, args, kwargs, peer, tracked=tensors)
        note(tape, recording, tensors, payload.header, peer, self._serializer)
        return payload

    def attach(self, header: dict[str, Any], peer: Peer) -> None:
        """Let the tape add to the header of a request without arguments."""
        tape = self._tracing.tape
        recording = None if tape is None else tape.calling(peer)
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

    def received(self, peer: Peer, frame: Frame) -> Task | None:
        """Handle a frame of kind ``REPLY`` or ``FAILURE``."""
        arrivals = self._adopt(frame[2], peer) if frame[2] else None
        call = self.table.answered(frame[1], peer)
        if call is None:
            return None
        if arrivals is not None:
            call.arrivals = arrivals
        if call.settle(frame) and call.future is not None:
            return call.future.complete, COMPLETION
        return None

    def request_unsent(self, peer: Peer, call_id: int, error: BaseException) -> None:
        """Handle that a request that was to be sent later could not be sent: see ``Sender.on_unsent``."""
        call = self.table.answered(call_id, peer)
        if call is not None:
            if isinstance(error, QueueFull):
                error = call.timeout_error()
            if call.settle(error) and call.future is not None:
                self._run_soon([(call.future.complete, COMPLETION)])

    def request_lost(self, peer: Peer, call_id: int, what: str) -> None:
        """Handle that a large request has not arrived, so it does not run: see ``Dispatcher.on_lost``."""
        call = self.table.answered(call_id, peer)
        error = MessageLostError(f"the call did not run: {what}. It can be made again", peer.name)
        if call is not None and call.settle(error) and call.future is not None:
            self._run_soon([(call.future.complete, COMPLETION)])

    def future(self, call: PendingCall) -> Future[Any]:
        """Return the future of a call that was just made."""
        future = Future.for_call(call)
        self.table.watch(call)
        return future

    # ---- the CallOwner

    def decode(self, call: PendingCall, frame: Frame) -> Any:
        kind, _, header, buffers, codec = frame
        if call.peer.devices is not None:
            call.peer.devices.updates.wait()
        if kind == Kind.FAILURE:
            raise self._serializer.load_exception(header, buffers, call.arrivals, call.peer, codec=codec)
        connect: Connect | None = None if call.wants_graph else _as_leaves
        if header:
            recording = self._tracing.recording_of(header, call.peer, answer=True)
            connect = connect if recording is None else recording.connect
        return self._serializer.codecs[codec].loads(
            header, buffers, call.arrivals, call.peer, connect=connect
        )

    def complete_soon(self, *futures: Future[Any]) -> None:
        self._run_soon([(future.complete, COMPLETION) for future in futures])

    def expire(self, call: PendingCall) -> BaseException | None:
        error = self.table.expire(call)
        self._activity.ended()  # in case its callee is gone, or its answer has just arrived
        return error

    def cancel(self, call: PendingCall) -> bool:
        if call.keeps_place or not self.table.give_up(call):
            return False
        self._post(call.peer, CANCEL, call.call_id)
        call.settle(call.cancelled_error())
        self._activity.ended()
        return True

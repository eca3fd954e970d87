"""The caller's side: make a call of a function and its arguments, send it, and wait.

A call is serialized on the caller's thread, entered into the table of calls, and sent (``dispatcher``). All
calls begin in ``request``, or in ``inquire`` if the thread waits for the answer at once. ``calls`` handles
their outcome, ``received_requests`` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import TIMEOUT_MAX
from time import monotonic
from typing import Any

from torch import Tensor

from rpc.agent.calls import CallTable, PendingCall
from rpc.agent.dispatcher import Sender
from rpc.agent.futures import Future
from rpc.agent.tape import Tracing, note
from rpc.errors import WorkerLostError
from rpc.group.membership import WorkerReference
from rpc.group.peer import Peer, PeerTable
from rpc.options import UNSET_TIMEOUT
from rpc.runtime import interrupts
from rpc.runtime.events import Events
from rpc.runtime.interrupts import is_interruption, protected
from rpc.serialization.payload import Payload
from rpc.serialization.serializer import Serializer
from rpc.serialization.tracked import stand_ins
from rpc.transport.base import INFINITE, QueueFull
from rpc.wire.frames import Kind

__all__ = ["UNSET_TIMEOUT", "Caller"]


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
    ) -> PendingCall:
        """Send a call of a function; raises if it cannot be sent.

        Args:
            timeout: timeout in seconds; 0 for none, ``UNSET_TIMEOUT`` for the default.
        """
        peer = self._peers.find(to)
        payload = self.dump_call(function, args, kwargs, peer)
        return self.request(peer, Kind.CALL, payload, timeout, function)

    @protected
    def call_async(
        self,
        to: WorkerReference,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> Future[Any]:
        """Like ``call``, but return a future. If many calls are under way, it may be sent together with the
        following.
        """
        peer = self._peers.find(to)
        payload = self.dump_call(function, args, kwargs, peer)
        return self.future(self.request(peer, Kind.CALL, payload, timeout, function, coalesce=True))

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
        call = self._table.open(peer, what, timeout, header=payload.header, coalesce=coalesce)
        self.transmit(call, kind, payload)
        return call

    @protected
    def inquire(self, peer: Peer, kind: int, payload: Payload, timeout: float, what: object) -> Any:
        """Like ``request``, but wait for the answer, and return its value or raise its error."""
        timeout = self.rpc_timeout if timeout is UNSET_TIMEOUT else self._checked(timeout, payload, peer)
        call = self._table.open(peer, what, timeout, header=payload.header, how="sync")
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

    def future(self, call: PendingCall) -> Future[Any]:
        """Return the future of a call that was just made."""
        future = Future.for_call(call)
        self._table.watch(call)
        return future

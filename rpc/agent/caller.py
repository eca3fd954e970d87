"""The caller's side: make a call of a function and its arguments, and send it.

A call is serialized on the caller's thread, entered into the table of calls, and its frame handed to the
peer. What comes of it is the business of ``pending``; how it is run, of ``callee``.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from rpc.agent.futures import Future
from rpc.agent.pending_call import PendingCall
from rpc.agent.tape import note
from rpc.errors import WorkerLostError
from rpc.group.membership import WorkerReference
from rpc.group.peer import Peer
from rpc.options import UNSET_TIMEOUT
from rpc.serialization.payload import Payload
from rpc.serialization.tracked import stand_ins
from rpc.transport import INFINITE, QueueFull
from rpc.wire.frames import Kind

if TYPE_CHECKING:
    from rpc.agent.agent import Agent

__all__ = ["UNSET_TIMEOUT", "Caller"]


_FEW: Final = 16
"""With more calls under way, it matters how many go out at once more than how soon."""


class Caller:
    """Makes the calls of one agent, from any thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def call(
        self,
        to: WorkerReference,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        *,
        gather: bool = False,
    ) -> PendingCall:
        """Send a call; what cannot be sent raises here.

        Args:
            gather: the caller does not wait for it now: where many calls are under way, it may be sent with
                those that follow.
            timeout: seconds; 0 for none, ``UNSET_TIMEOUT`` for the default.
        """
        call, payload = self._open(to, function, args, kwargs, timeout)
        try:
            self.transmit(call, Kind.CALL, payload, gather=gather and len(self._agent.calls) > _FEW)
        except BaseException:
            self._forget_unsent(call)
            raise
        return call

    def ask(
        self,
        to: WorkerReference,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> Any:
        """Send a call, wait, and return its value or raise; arguments are as for ``call``."""
        call, payload = self._open(to, function, args, kwargs, timeout)
        try:
            return self._exchange(call, Kind.CALL, payload)
        except BaseException:
            self._forget_unsent(call)
            raise

    def _exchange(self, call: PendingCall, kind: int, payload: Payload) -> Any:
        """Send the message of a call that is in the table, wait, and return its value or raise."""
        connection = call.peer.connection
        direct = None if connection is None else connection.direct
        if direct is None or len(payload.buffers) > 1:
            # To send much takes long, and the loop reads meanwhile.
            self.transmit(call, kind, payload)
            return call.result()
        try:
            call.turn = direct.claim()  # now: once the call is sent, the reply may come at once
            self.transmit(call, kind, payload)
            return call.result()
        except BaseException:
            direct.leave()
            raise

    def _forget_unsent(self, call: PendingCall) -> None:
        """An exception, such as Ctrl-C: if it came before the call was sent, no answer will ever come."""
        if not call.sent:
            self.drop(call)

    def drop(self, call: PendingCall) -> bool:
        """Remove a call to which no answer will come, and say so; false if it has ended already."""
        dropped = self._agent.calls.take(call.call_id) is not None
        self._agent.something_ended()
        return dropped

    def _open(
        self,
        to: WorkerReference,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> tuple[PendingCall, Payload]:
        """A call in the table, and its message."""
        agent = self._agent
        timeout = agent.rpc_timeout if timeout == UNSET_TIMEOUT else self.effective_timeout(timeout)
        peer = agent.peer(to)
        payload = self.dump_call(function, args, kwargs, peer)
        return agent.calls.open(peer, function, timeout), payload

    def dump_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], peer: Peer
    ) -> Payload:
        """The message of a call, and what the tape says of it.

        It is serialized with the pickler that the user has put in place of ours, if there is one.
        """
        agent = self._agent
        tape = agent.tape
        recording = None if tape is None else tape.calling(peer)
        if tape is None or recording is None:
            payload = agent.serializer.dump_call(function, args, kwargs, peer)
        else:
            tensors: list[Tensor] = []
            if recording.tracks:
                args, kwargs = stand_ins(args, kwargs)
            payload = agent.serializer.dump_call(function, args, kwargs, peer, tracked=tensors)
            note(tape, recording, tensors, payload.header, peer)
        return payload

    def attach(self, header: dict[str, Any], peer: Peer) -> None:
        """Let the tape add to the header of a request without arguments."""
        tape = self._agent.tape
        recording = None if tape is None else tape.calling(peer)
        if tape is not None and recording is not None:
            note(tape, recording, [], header, peer)

    def request(self, peer: Peer, kind: int, payload: Payload, timeout: float, what: object) -> PendingCall:
        """Send any message that is answered by a reply or a failure.

        A worker that is gone is not an error here, but the call's outcome.

        Args:
            what: what is asked, for error messages: a text or a function.
        """
        call = self._opened(peer, payload, timeout, what)
        try:
            self.transmit(call, kind, payload)
        except BaseException:
            self._forget_unsent(call)
            raise
        return call

    def inquire(self, peer: Peer, kind: int, payload: Payload, timeout: float, what: object) -> Any:
        """As ``request``, but wait for the answer, and return its value or raise."""
        call = self._opened(peer, payload, timeout, what)
        try:
            return self._exchange(call, kind, payload)
        except BaseException:
            self._forget_unsent(call)
            raise

    def _opened(self, peer: Peer, payload: Payload, timeout: float, what: object) -> PendingCall:
        agent = self._agent
        if timeout == UNSET_TIMEOUT:
            return agent.calls.open(peer, what, agent.rpc_timeout)
        try:
            timeout = self.effective_timeout(timeout)
        except BaseException:
            agent.serializer.take_back(payload.header, peer)
            raise
        return agent.calls.open(peer, what, timeout)

    def effective_timeout(self, timeout: float) -> float:
        """A timeout as the user gave it, with ``UNSET_TIMEOUT`` replaced by the default.

        Raises:
            TypeError, ValueError: it is no number of seconds.
        """
        try:
            if timeout == UNSET_TIMEOUT:
                return self._agent.rpc_timeout
            if 0 <= timeout <= TIMEOUT_MAX:
                return timeout
            if timeout > TIMEOUT_MAX:
                return 0.0
        except TypeError:
            given = f"{type(timeout).__name__} {timeout!r:.60}"
            raise TypeError(f"a timeout is a number of seconds, 0 for none, not {given}") from None
        raise ValueError(f"a timeout is a number of seconds, 0 for none, not {timeout}")

    def transmit(self, call: PendingCall, kind: int, payload: Payload, *, gather: bool = False) -> None:
        """Send the message of a call that is in the table; see ``request``."""
        try:
            self._agent.send(
                call.peer, kind, call.call_id, payload, wait=call.timeout or INFINITE, gather=gather
            )
            call.sent = True
        except QueueFull:
            if self.drop(call):
                call.settle(call.timeout_error())
        except WorkerLostError:
            # If the loop has not noted why the connection is closed, it is about to, and ends the call then.
            if call.peer.lost is not None and self.drop(call):
                call.settle(call.lost_error())
        except BaseException:
            self.drop(call)
            raise

    def future(self, call: PendingCall) -> Future[Any]:
        """The future of a call just made."""
        future = Future.for_call(call)
        self._agent.calls.watch(call)
        return future

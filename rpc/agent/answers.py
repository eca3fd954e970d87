"""A request of another worker, and the answer to it: a value, or an exception.

If a value cannot be sent, the answer is the error that says why. An exception that is too large is replaced
by its description.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Final

import torch

from rpc.agent.border import Enclosure
from rpc.agent.calls import name_of
from rpc.agent.dispatcher import Dispatcher, Sender
from rpc.agent.tape import Observation, Recording, Tracing, note
from rpc.errors import (
    GivenUpError,
    MessageLostError,
    NoMemoryError,
    NotInitializedError,
    RpcError,
    RRefError,
    WorkerLostError,
)
from rpc.group.peer import Peer, PeerTable
from rpc.runtime.code_folders import OURS
from rpc.runtime.current import is_initialized
from rpc.runtime.events import Events
from rpc.runtime.tasks import Task
from rpc.runtime.tracebacks import place_of
from rpc.serialization.failures import beginning_of, text_of
from rpc.serialization.payload import Payload
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import Frame, Kind

__all__ = ["Answer", "Answers", "Request"]

logger = logging.getLogger(__name__)

Answer = Callable[[Any, BaseException | None], None]
"""Called once, with the value or the exception."""

_SHOWN_OF_ERROR: Final = 50
"""Maximum number of characters of an error in the log; the caller gets all of them."""


class Request:
    """A call that has arrived: its caller, its message, and the objects beside the pickle.

    ``recording`` is its recording, once it is loaded; ``task`` runs its coroutine, if it has one.
    ``cancelled``: whether its caller has cancelled it, or it has failed. ``failure``: why it cannot begin.
    ``began``: when it arrived, on the monotonic clock.
    ``enclosure``: what it runs inside of, if anything.
    ``taken``: when a thread began to load it, if there is a listener for runs.
    """

    __slots__ = (
        "arrivals",
        "began",
        "cancelled",
        "enclosure",
        "failure",
        "frame",
        "peer",
        "recording",
        "taken",
        "task",
    )

    def __init__(self, peer: Peer, frame: Frame, arrivals: Any = None) -> None:
        self.peer = peer
        self.frame = frame
        self.arrivals = arrivals
        self.recording: Recording | Observation | None = None
        self.cancelled = False
        self.failure: BaseException | None = None
        self.began = monotonic()
        self.taken = 0.0
        self.task: asyncio.Task[None] | None = None
        self.enclosure: Enclosure | None = None

    def cancel(self) -> None:
        """Keep it from beginning, or cancel its coroutine; a function on a thread continues. From
        any thread.
        """
        self.cancelled = True  # first: a coroutine that begins now sets its task, then checks this
        task = self.task
        if task is not None:
            with suppress(RuntimeError):  # the loop has ended
                task.get_loop().call_soon_threadsafe(task.cancel)

    def fail(self, error: BaseException) -> None:
        """Keep it from beginning: it is answered with an error."""
        self.failure = error
        self.cancelled = True


class Answers:
    """Answers requests, from any thread.

    Args:
        peers: the workers; has this worker's name, for messages.
        send: sends an answer; see ``Sender.send``.
        run_soon: has tasks run on executor threads.

    Attributes:
        unanswered: the requests that were entered and are not answered yet, by caller and call id.
    """

    def __init__(
        self,
        peers: PeerTable,
        serializer: Serializer,
        tracing: Tracing,
        events: Events,
        send: Callable[..., object],
        run_soon: Callable[[Sequence[Task]], object],
    ) -> None:
        self.unanswered: dict[tuple[Peer, int], Request] = {}
        self._peers = peers
        self._serializer = serializer
        self._tracing = tracing
        self._events = events
        self._send = send
        self._run_soon = run_soon

    def register(self, dispatcher: Dispatcher, sender: Sender) -> None:
        """Register the handlers of answers that do not arrive, and of requests that cannot be taken in."""
        dispatcher.on_lost((Kind.REPLY, Kind.FAILURE), self.answer_lost)
        dispatcher.on_failed((None,), self.request_failed)
        sender.on_unsent((Kind.REPLY, Kind.FAILURE), self.answer_unsent)

    def replier(self, request: Request, function: object = None) -> Answer:
        """Return a function that answers a request for ``function``, once."""
        what = None if function is None else name_of(function)
        peer, call_id, codec = request.peer, request.frame.call_id, request.frame.codec

        def answer(value: Any, error: BaseException | None) -> None:
            if error is None and request.cancelled:
                error = asyncio.CancelledError()
            if error is not None:
                self.fail(peer, call_id, error, what)
            else:
                result = None if what is None else f"the result of {what}"
                self.reply(peer, call_id, value, result, request.recording, codec, by=what)

        return answer

    def reply(
        self,
        peer: Peer,
        call_id: int,
        value: Any,
        of: object = None,
        recording: Recording | Observation | None = None,
        codec: int | None = None,
        *,
        by: object = None,
    ) -> None:
        """Answer a request with the value of ``of``, a function or a text. If it cannot be sent, answer with
        that error, as raised ``by`` the function, by default ``of``.
        """
        try:
            payload = self.dump_reply(peer, value, of, recording, codec)
        except BaseException as error:
            self.fail(peer, call_id, error, of if by is None else by)
        else:
            self.answer(peer, Kind.REPLY, call_id, payload)

    def dump_reply(
        self,
        peer: Peer,
        value: Any,
        of: object,
        recording: Recording | Observation | None,
        codec: int | None = None,
    ) -> Payload:
        """Serialize the value for the answer to a request; arguments are as for ``reply``."""
        serializer = peer.codec if codec is None else self._serializer.codecs[codec]
        if recording is None:
            return serializer.dumps(value, peer, what=of)
        if isinstance(recording, Observation):
            payload = self.dump_reply(peer, value, of, recording.inner, codec)
            recording.tell(payload.header)
            return payload
        tape = self._tracing.tape
        if tape is None:
            return serializer.dumps(value, peer, what=of)
        tensors: list[torch.Tensor] = []
        if recording.tracks:
            payload = serializer.dumps(value, peer, what=of, tracked=tensors)
        else:
            with torch.no_grad():
                payload = serializer.dumps(value, peer, what=of, tracked=tensors)
        if tensors:
            note(tape, recording, tensors, payload.header, peer, self._serializer)
        return payload

    def fail(self, peer: Peer, call_id: int, error: BaseException, of: object = None) -> None:
        """Answer a request with an exception; ``of`` is as for ``reply``."""
        request = self.unanswered.get((peer, call_id))
        wanted = request is not None and request.cancelled and isinstance(error, asyncio.CancelledError)
        # A function that continues after this worker has ended, for example by KeyboardInterrupt, cannot call
        # others, or use its references.
        wanted |= isinstance(error, NotInitializedError | RRefError) and not is_initialized()
        # The loss of its caller has been logged already, and nobody can be answered.
        consequence = isinstance(error, GivenUpError) or (
            isinstance(error, WorkerLostError) and error.worker == peer.name
        )
        said = beginning_of(text_of(error), _SHOWN_OF_ERROR)
        logger.log(
            logging.DEBUG if wanted else logging.INFO if consequence else logging.WARNING,
            "worker '%s': %s, called by worker '%s', raised %s%s%s%s",
            self._peers.own.name,
            _raised_in(error) if of is None else name_of(of),
            peer.name,
            type(error).__name__,
            "" if request is None else f" after {monotonic() - request.began:.4f} s",
            place_of(error),
            f": {said}" if said else "",
            exc_info=error if logger.isEnabledFor(logging.DEBUG) else None,
        )
        serializer, codec = self._serializer, peer.codec.id
        payload = serializer.dump_exception(error, self._peers.own.name, peer, codec=codec)
        self.answer(peer, Kind.FAILURE, call_id, payload)

    def answer(
        self, peer: Peer, kind: int, call_id: int, payload: Payload, *, coalesce: bool = False
    ) -> None:
        """Answer a request, which may have been entered, with an existing message.

        Args:
            coalesce: whether it may be sent together with the answers that follow.
        """
        self.unanswered.pop((peer, call_id), None)
        try:
            self._send(peer, kind, call_id, payload, coalesce=coalesce)
            tell = self._events.request_ended
            if tell is not None:
                tell(peer.name, call_id, kind == Kind.FAILURE)
        except WorkerLostError as error:
            # No worker is left to be answered, which is not a failure of this one.
            logger.debug("dropped an answer: %s", error)
        except Exception as error:
            if kind == Kind.FAILURE:
                logger.exception("could not even send a failure to worker '%s'", peer.name)
                raise
            self.fail(peer, call_id, error)

    def request_failed(self, peer: Peer, call_id: int, error: Exception) -> None:
        """Handle that a request could not be taken in, and does not run: see ``Dispatcher.on_failed``. It is
        answered by another thread, as ``answer_lost`` does.
        """
        lacking = NoMemoryError if isinstance(error, MemoryError) else RpcError
        failure = lacking(
            f"worker '{self._peers.own.name}' could not take in the call, which has not run: "
            f"{type(error).__name__}: {text_of(error) or 'there is no memory'}. Try again when that worker "
            f"has more memory, threads or file descriptors"
        )
        failure.__cause__ = error
        self._run_soon([(lambda _: self.fail(peer, call_id, failure), None)])

    def answer_unsent(self, peer: Peer, call_id: int, error: BaseException) -> None:
        """Handle that an answer that was to be sent later could not be sent: see ``Sender.on_unsent``."""
        if peer.lost is None:
            self.fail(peer, call_id, error)

    def answer_lost(self, peer: Peer, call_id: int, what: str) -> None:
        """Handle that a large answer has not arrived: see ``Dispatcher.on_lost``. The error is sent in its
        place, by another thread: it may have to wait for room, which this thread must make.
        """
        error = MessageLostError(f"the call ran, and its answer was lost: {what}", peer.name)
        self._run_soon([(lambda _: self.fail(peer, call_id, error), None)])


def _raised_in(error: BaseException) -> str:
    """Return the user's function that raised an error first; "a call" if none was reached."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename.startswith(OURS):
            trace = trace.tb_next
            continue
        return code.co_qualname
    return "a call"

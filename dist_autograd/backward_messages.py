"""The messages between the workers of a backward pass.

========== ======================= ===============================================================
mark       root to a worker        these tensors of these messages take part; answered with the marks
                                   that follow from it, on any workers
part       root to a worker        all is marked, including these tensors: begin; answered when the
                                   part is done, or has failed; the answer says whether it stepped
whole part root to a worker        the same, if the part is about one message, whose gradients it
                                   carries; the answer may carry gradients for the root
gradients  receiver to sender      the gradients of one message
abort      root to a worker        the backward pass has failed elsewhere
========== ======================= ===============================================================

A backward pass is identified by the incarnation of its root and a number; in a message from the root, the
incarnation is implied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

from torch import Tensor

from dist_autograd.contexts import Context
from dist_autograd.graph import Mark
from dist_autograd.recording import Origin
from rpc.agent.calls import Caller, CallTable, PendingCall
from rpc.agent.dispatcher import Sender
from rpc.errors import AutogradError, BackwardError, ProtocolError, WorkerLostError
from rpc.group.peer import Peer
from rpc.group.workers import WorkerInfo
from rpc.serialization.failures import text_of
from rpc.serialization.payload import Payload
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import Frame, Kind
from rref.protocol.messages import RRefId
from rref.requests import object_id

__all__ = [
    "ABORT",
    "GRADIENTS",
    "MARK",
    "PART",
    "WHOLE_PART",
    "Key",
    "PartRequest",
    "RemotePart",
    "SentMessages",
    "failure_of",
]

logger = logging.getLogger(__name__)

MARK: Final = Kind.EXTENSION + 16
GRADIENTS: Final = Kind.EXTENSION + 17
ABORT: Final = Kind.EXTENSION + 19
PART: Final = Kind.EXTENSION + 21
WHOLE_PART: Final = Kind.EXTENSION + 22

_WHAT: Final = "a distributed backward"

_OF_SENDER: Final = itemgetter(slice(1, None))
"""Returns a mark as its sender knows it: the message's number, and the tensor's index."""

Key = tuple[int, int]
"""Id of a backward pass: the incarnation of its root, and a number."""


class PartRequest(NamedTuple):
    """The content of a mark or a part, as far as the header is checked."""

    number: int
    context_id: int
    retain_graph: bool
    marks: list[Any]
    """Marks of this worker's messages, each a message's number and a tensor's index."""
    message: int | None
    """For a whole part: the message whose gradients it carries."""
    optimizer: RRefId | None
    """The object whose ``step`` is called at the end of the part, with the context's id, unless it has to
    wait for the end of the backward.
    """


def read_request(frame: Frame) -> PartRequest:
    """Read the content of a mark or a part."""
    match frame.header.get("backward"):
        case [int(number), int(context_id), bool(retain_graph), list(marks), None | int() as message]:
            optimizer = object_id(frame.header) if "object" in frame.header else None
            return PartRequest(number, context_id, retain_graph, marks, message, optimizer)
        case other:
            raise ProtocolError(f"a part of a backward that cannot be: {str(other)[:80]}")


def read_gradients(frame: Frame) -> tuple[Key, int]:
    """Read which backward pass and which message these gradients belong to."""
    match frame.header.get("gradients"):
        case [int(root), int(number), int(message)]:
            return (root, number), message
        case other:
            raise ProtocolError(f"gradients that cannot be: {str(other)[:80]}")


def read_abort(frame: Frame) -> tuple[int, str]:
    """Read the number of a backward pass, and the reason why it has failed."""
    match frame.header.get("abort"):
        case [int(number), str(reason)]:
            return number, reason
        case other:
            raise ProtocolError(f"an abort that cannot be: {str(other)[:80]}")


class RemotePart(PendingCall):
    """The part of another worker, as a call of the root that is answered when the part is done.

    Attributes:
        when_settled: called when it has ended, on any thread but the one that waits for it.
        whole: whether all its gradients are sent with its start, and those for the root with its answer.
    """

    when_settled: Callable[[RemotePart], None] | None = None
    whole = False

    def settle(self, outcome: Frame | BaseException) -> bool:
        nobody_waits = super().settle(outcome)
        if self.when_settled is not None:
            self.when_settled(self)
        return nobody_waits

    def lost_error(self) -> WorkerLostError:
        return self.peer.lost_error("The backward cannot be finished")


class SentMessages:
    """Sends the messages. From any thread."""

    def __init__(self, caller: Caller, table: CallTable, sender: Sender, serializer: Serializer) -> None:
        self._caller = caller
        self._table = table
        self._sender = sender
        self._serializer = serializer

    def mark(
        self, key: Key, context: Context, peer: Peer, retain_graph: bool, marks: Iterable[Mark]
    ) -> PendingCall:
        """Ask a worker which marks follow from some; see ``marks_in``."""
        asked = [key[1], context.id, retain_graph, list(map(_OF_SENDER, marks)), None]
        payload = Payload({"backward": asked}, [])
        return self._caller.request(peer, MARK, payload, 0, _WHAT)

    def marks_in(self, answer: PendingCall) -> list[Mark]:
        """Wait for the answer to ``mark``; raises its error, if it has one."""
        answer.wait()
        outcome = answer.outcome
        if isinstance(outcome, Frame) and outcome.kind == Kind.REPLY and "marks" in outcome.header:
            return [Mark(*mark) for mark in outcome.header["marks"]]
        answer.result()
        raise ProtocolError(f"worker '{answer.peer.name}' answered a mark with a value")

    def new_part(self, peer: Peer) -> RemotePart:
        """Make a part, to be started by ``begin``."""
        return self._table.open(peer, _WHAT, 0, RemotePart)

    def begin(
        self,
        part: RemotePart,
        key: Key,
        context: Context,
        retain_graph: bool,
        marks: Iterable[Mark],
        whole: tuple[Origin, Sequence[Tensor | None]] | None = None,
        optimizer: RRefId | None = None,
    ) -> None:
        """Have a worker run its part.

        Args:
            marks: marks that it was not asked about before.
            whole: for a whole part, the gradients, and their origin.
            optimizer: an object of that worker, whose ``step`` ends its part.
        """
        kind, payload, message = PART, Payload({}, []), None
        try:
            if whole is not None:
                origin, gradients = whole
                kind, message, part.whole = WHOLE_PART, origin.message, optimizer is None
                payload = self.dump(gradients, origin)
            marked = list(map(_OF_SENDER, marks))
            payload.header["backward"] = [key[1], context.id, retain_graph, marked, message]
            if optimizer is not None:
                payload.header["object"] = list(optimizer)
            self._caller.transmit(part, kind, payload)
        except BaseException:
            self._table.drop(part)
            raise

    def cancel(self, part: RemotePart, error: BaseException) -> None:
        """Stop waiting for a part."""
        if self._table.drop(part):
            part.settle(error)

    def gradients(self, key: Key, origin: Origin, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of a message to its sender."""
        payload = self.dump(gradients, origin)
        payload.header["gradients"] = [*key, origin.message]
        self._sender.send(origin.source, GRADIENTS, 0, payload)

    def dump(self, gradients: Sequence[Tensor | None], origin: Origin) -> Payload:
        """Serialize a message's gradients for its sender; to devices, with the inverse of the device map that
        its tensors came by.
        """
        to, what = origin.source, "the gradients of a message"
        payload: Payload = to.codec.dump_tensors(gradients, to, what, as_call=origin.answer)
        return payload

    def abort(self, key: Key, peer: Peer, error: BaseException) -> None:
        """Notify a worker that the backward pass has failed."""
        header = {"abort": [key[1], f"{type(error).__name__}: {text_of(error)}"]}
        try:
            self._sender.send(peer, ABORT, 0, Payload(header, []))
        except WorkerLostError as lost:
            logger.debug("no worker is left to be notified of the end of a backward pass: %s", lost)

    def failure(self, peer: Peer, frame: Frame) -> BaseException:
        """Return a worker's failure as the root raises it; loading the error may run user code."""
        error = self._serializer.load_exception(frame.header, frame.buffers, None, peer, codec=frame.codec)
        if isinstance(error, WorkerLostError):
            return error
        failure = failure_of(peer.member.info, error)
        failure.__cause__ = error
        return failure


def failure_of(worker: WorkerInfo, error: BaseException) -> BackwardError:
    """Return the error of ``backward`` for the failure of a worker's part."""
    text = text_of(error)
    if "use_reentrant=True" in text:  # PyTorch's advice, to call backward differently, does not apply here
        text = (
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=True) cannot be used in a distributed "
            "backward, since it begins a backward of its own, whose gradients would not enter the context: "
            "pass use_reentrant=False"
        )
    failure = BackwardError(
        f"Error on Node {worker.id}: {text}\n(raised in the backward on worker '{worker.name}')",
        worker.name,
    )
    if "modified by an inplace operation" in text:
        failure.add_note(
            "If another trainer's step came between this forward and its backward: its DistributedOptimizer "
            "was given stale_gradients=False; without that, such a backward continues with the parameters "
            "as they are"
        )
    return failure


def given_up() -> AutogradError:
    """Return the error of a part whose root does not continue."""
    return AutogradError("the backward was given up by the worker that started it")

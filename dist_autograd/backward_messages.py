"""What the workers of a backward say to each other.

========== ======================= ===============================================================
mark       root to a worker        these tensors of these messages take part; answered by the marks
                                   that follow from it, on whatever workers
part       root to a worker        all is marked, these tensors also: begin; answered when the part is
                                   done, or has failed
whole part root to a worker        the same, where it is all about one message, whose gradients it brings;
                                   the answer may bring gradients for the root
gradients  receiver to sender      the gradients of one message
abort      root to a worker        the backward has failed elsewhere
========== ======================= ===============================================================

A backward is named by the incarnation of its root and a number; that a message comes from the root says the
first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor

from dist_autograd.contexts import Context
from dist_autograd.graph import Mark
from dist_autograd.ports import BackwardCalls
from dist_autograd.recording import Origin
from dist_autograd.remote_part import RemotePart
from rpc.agent.calls import PendingCall
from rpc.agent.ports import CallsUnderWay, SendMessage
from rpc.errors import AutogradError, BackwardError, ProtocolError, WorkerLostError
from rpc.group.peer import Peer
from rpc.group.workers import WorkerInfo
from rpc.serialization.failures import text_of
from rpc.serialization.payload import Payload
from rpc.wire.frames import Frame, Kind

__all__ = [
    "ABORT",
    "GRADIENTS",
    "MARK",
    "PART",
    "WHOLE_PART",
    "Key",
    "PartRequest",
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

Key = tuple[int, int]
"""Which backward: the incarnation of its root, and a number."""


class PartRequest(NamedTuple):
    """What a mark or a part says, as far as the header is checked."""

    number: int
    context_id: int
    retain_graph: bool
    marks: list[Any]
    """Of this worker's messages, each its number and which tensor."""
    message: int | None
    """Of a whole part: whose gradients it brings."""


def read_request(frame: Frame) -> PartRequest:
    """What a mark or a part says."""
    match frame.header.get("backward"):
        case [int(number), int(context_id), bool(retain_graph), list(marks), None | int() as message]:
            return PartRequest(number, context_id, retain_graph, marks, message)
        case other:
            raise ProtocolError(f"a part of a backward that cannot be: {str(other)[:80]}")


def read_gradients(frame: Frame) -> tuple[Key, int]:
    """Of which backward these gradients are, and of which message."""
    match frame.header.get("gradients"):
        case [int(root), int(number), int(message)]:
            return (root, number), message
        case other:
            raise ProtocolError(f"gradients that cannot be: {str(other)[:80]}")


def read_abort(frame: Frame) -> tuple[int, str]:
    """The number of a backward, and why it has failed."""
    match frame.header.get("abort"):
        case [int(number), str(reason)]:
            return number, reason
        case other:
            raise ProtocolError(f"an abort that cannot be: {str(other)[:80]}")


class SentMessages:
    """Sends them. From any thread."""

    def __init__(
        self,
        calls: BackwardCalls,
        under_way: CallsUnderWay,
        send: SendMessage,
        load_exception: Callable[..., BaseException],
    ) -> None:
        self._calls = calls
        self._under_way = under_way
        self._send = send
        self._load_exception = load_exception

    def mark(
        self, key: Key, context: Context, peer: Peer, retain_graph: bool, marks: Iterable[Mark]
    ) -> PendingCall:
        """Ask a worker what follows from marks; see ``marks_in``."""
        payload = Payload({"backward": _request(key, context, retain_graph, marks, None)}, [])
        return self._calls.request(peer, MARK, payload, 0, _WHAT)

    def marks_in(self, answer: PendingCall) -> list[Mark]:
        """Wait for the answer to ``mark``; raises what it says went wrong."""
        answer.wait()
        outcome = answer.outcome
        if isinstance(outcome, Frame) and outcome.kind == Kind.REPLY and "marks" in outcome.header:
            return [Mark(*mark) for mark in outcome.header["marks"]]
        answer.result()
        raise ProtocolError(f"worker '{answer.peer.name}' answered a mark with a value")

    def new_part(self, peer: Peer) -> RemotePart:
        """A part to be begun by ``begin``."""
        return self._under_way.open(peer, _WHAT, 0, RemotePart)

    def begin(
        self,
        part: RemotePart,
        key: Key,
        context: Context,
        retain_graph: bool,
        marks: Iterable[Mark],
        whole: tuple[Origin, Sequence[Tensor | None]] | None = None,
    ) -> None:
        """Have a worker run its part.

        Args:
            marks: those that it was not asked about.
            whole: of a whole part, the gradients, and where they go.
        """
        kind, payload, message = PART, Payload({}, []), None
        try:
            if whole is not None:
                origin, gradients = whole
                kind, message, part.whole = WHOLE_PART, origin.message, True
                payload = self.dump(gradients, origin)
            payload.header["backward"] = _request(key, context, retain_graph, marks, message)
            self._calls.transmit(part, kind, payload)
        except BaseException:
            self._calls.drop(part)
            raise

    def cancel(self, part: RemotePart, error: BaseException) -> None:
        """Wait for a part no longer."""
        if self._calls.drop(part):
            part.settle(error)

    def gradients(self, key: Key, origin: Origin, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of a message to where it came from."""
        payload = self.dump(gradients, origin)
        payload.header["gradients"] = [*key, origin.message]
        self._send(origin.source, GRADIENTS, 0, payload)

    def dump(self, gradients: Sequence[Tensor | None], origin: Origin) -> Payload:
        """A message's gradients, to be sent where it came from; to devices by the reverse of the map by which
        its tensors came.
        """
        to, what = origin.source, "the gradients of a message"
        payload: Payload = to.codec.dump_tensors(gradients, to, what, as_call=origin.answer)
        return payload

    def load(self, peer: Peer, frame: Frame) -> Sequence[Tensor | None]:
        """The gradients in a message."""
        tensors: Sequence[Tensor | None] = peer.codec.load_tensors(frame.buffers, peer)
        return tensors

    def abort(self, key: Key, peer: Peer, error: BaseException) -> None:
        """Tell a worker that the backward has failed."""
        header = {"abort": [key[1], f"{type(error).__name__}: {text_of(error)}"]}
        try:
            self._send(peer, ABORT, 0, Payload(header, []))
        except WorkerLostError as lost:
            logger.debug("nobody is left to be told how a backward went: %s", lost)

    def failure(self, peer: Peer, frame: Frame) -> BaseException:
        """What a worker's failure is to its root; loading the error may run code of the user's."""
        error = self._load_exception(frame.header, frame.buffers, None, peer, codec=frame.codec)
        if isinstance(error, WorkerLostError):
            return error
        failure = failure_of(peer.member.info, error)
        failure.__cause__ = error
        return failure


def _request(
    key: Key, context: Context, retain_graph: bool, marks: Iterable[Mark], message: int | None
) -> list[Any]:
    return [key[1], context.id, retain_graph, [mark[1:] for mark in marks], message]


def failure_of(worker: WorkerInfo, error: BaseException) -> BackwardError:
    """What the failure of a worker's part is to the one who called ``backward``."""
    text = text_of(error)
    if "use_reentrant=True" in text:  # PyTorch advises to call backward otherwise, which ours cannot
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
            "If it was another trainer's step that came between this forward and its backward: without "
            "stale_gradients=False, which its DistributedOptimizer was given, such a backward goes on with "
            "the parameters that it finds"
        )
    return failure


def given_up() -> AutogradError:
    """The error of a part whose root does not go on."""
    return AutogradError("the backward was given up by the one who began it")

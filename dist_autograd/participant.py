"""A backward pass on a worker that the root has asked to take part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dist_autograd.backward_messages import Key, SentMessages
from dist_autograd.progress import Action, Error, Event
from dist_autograd.recording import Origin
from dist_autograd.worker_pass import WorkerPass
from rpc.agent.border import Work
from rpc.errors import AutogradError
from rpc.group.peer import Peer
from rpc.serialization.payload import Payload

__all__ = ["Participant"]


class Participant:
    """This worker's part of one backward pass, for its root.

    Args:
        key: id of the backward pass.
        own: the part.
        root: the worker that started the backward pass.
        messages: sends messages to others.
        whole: whether all its gradients arrive with its start, so that it waits for no worker.

    Attributes:
        step: called at the end of the part; returns whether it has performed a step. None for nothing.
    """

    step: Callable[[], bool] | None = None

    def __init__(self, key: Key, own: WorkerPass, root: Peer, messages: SentMessages, *, whole: bool) -> None:
        self.key = key
        self.own = own
        self.peer = root
        self.load = messages.load
        self._messages = messages
        self.whole = whole
        self._held_back: tuple[Origin, Sequence[Tensor | None], Work | None] | None = None
        """For a whole part, gradients for the root, which are sent in the answer."""

    def run(self, marks: Sequence[Any]) -> Payload:
        """Run the part; returns the answer, or raises the error that ended the backward pass.

        Args:
            marks: marks that this worker was not asked about before.
        """
        self.own.mark(marks, self.peer)
        self.own.run(self)
        if self.step is not None:
            self.own.progress.check()
            return Payload({"stepped": True} if self.step() else {}, [])
        if self._held_back is None:
            return Payload({}, [])
        origin, gradients, work = self._held_back
        if work is not None:
            work.join(gradients)
        answer = self._messages.dump(gradients, origin)
        answer.header["gradients"] = origin.message
        return answer

    def post(self, origin: Origin, gradients: Sequence[Tensor | None]) -> None:
        if self.whole and self.step is None and origin.source is self.peer:
            before = self._held_back
            border = self.own.context.requests.border
            work = border.work_on(gradients) if border.encloses else None
            self._held_back = origin, gradients, work
            if before is None:
                return
            origin, gradients, work = before
            if work is not None:
                work.join(gradients)
        self._messages.gradients(self.key, origin, gradients)

    def wait(self, ready: Callable[[], bool]) -> None:
        if self.whole:
            raise AutogradError(
                f"worker '{self.peer.name}' asked for a part of one message, and named others"
            )
        self.own.progress.wait(ready)

    def fail(self, error: Error) -> Action:
        """End the backward pass here; only the first error is kept."""
        return self.own.progress.on(Event.FAIL, error)

"""A backward as a worker sees it that another one, the root, has asked to take part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dist_autograd.backward_messages import Key, SentMessages
from dist_autograd.progress import Action, Error, Event
from dist_autograd.recording import Origin
from dist_autograd.worker_pass import WorkerPass
from rpc.agent.device_ports import SharedWork
from rpc.errors import AutogradError
from rpc.group.peer import Peer
from rpc.serialization.payload import Payload

__all__ = ["Participant"]


class Participant:
    """This worker's part of one backward, for its root.

    Args:
        key: of the backward.
        own: the part.
        root: who has begun the backward.
        messages: to others.
        whole: all its gradients come with what begins it, so it waits for nobody.
    """

    def __init__(self, key: Key, own: WorkerPass, root: Peer, messages: SentMessages, *, whole: bool) -> None:
        self.key = key
        self.own = own
        self.peer = root
        self.load = messages.load
        self._messages = messages
        self._whole = whole
        self._held_back: tuple[Origin, Sequence[Tensor | None], SharedWork | None] | None = None
        """Of a whole part, gradients for the root, which the answer brings."""

    def run(self, marks: Sequence[Any]) -> Payload:
        """Run it; returns the answer, or raises what ended the backward.

        Args:
            marks: those that were not asked about.
        """
        self.own.mark(marks, self.peer)
        self.own.run(self)
        if self._held_back is None:
            return Payload({}, [])
        origin, gradients, work = self._held_back
        if work is not None:
            work.join()
        answer = self._messages.dump(gradients, origin)
        answer.header["gradients"] = origin.message
        return answer

    def post(self, origin: Origin, gradients: Sequence[Tensor | None]) -> None:
        if self._whole and origin.source is self.peer:
            before = self._held_back
            self._held_back = origin, gradients, self.own.context.work_on(gradients)
            if before is None:
                return
            origin, gradients, work = before
            if work is not None:
                work.join()
        self._messages.gradients(self.key, origin, gradients)

    def wait(self, ready: Callable[[], bool]) -> None:
        if self._whole:
            raise AutogradError(
                f"worker '{self.peer.name}' asked for a part of one message, and named others"
            )
        self.own.progress.wait(ready)

    def fail(self, error: Error) -> Action:
        """End the backward here; the first error counts."""
        return self.own.progress.on(Event.FAIL, error)

"""The part of another worker in a backward pass, as a call of the root that is answered when it is done."""

from __future__ import annotations

from collections.abc import Callable

from rpc.agent.calls import PendingCall
from rpc.errors import WorkerLostError
from rpc.wire.frames import Frame

__all__ = ["RemotePart"]


class RemotePart(PendingCall):
    """A part under way.

    Attributes:
        when_settled: called when it has ended, on any thread but the one that waits for it.
        whole: whether all its gradients are sent with its start, so that it waits for no worker.
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

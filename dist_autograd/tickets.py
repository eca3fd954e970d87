"""Tickets: how one run of the engine waits for the gradients of several messages.

A message's ticket is a node that waits until the gradients of that message are there, and behind which its
leaves and send nodes are. Tickets are chained, so that only one is ready at any time, that of the newest
message; all other nodes that are ready run before it. So when it waits, everything that can run has run.
There is no deadlock: a gradient that is on its way to a message depends only on nodes that were made after
the message was sent. So the run that waits for the newest message of all, on whichever worker, can always
continue. ``WorkerPass.await_gradients`` checks this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor
from torch.autograd import Function

from dist_autograd import engine
from dist_autograd.recording import Sent

__all__ = ["new_ticket"]


class Ticket(Function):
    """Waits for the gradients of one message; then its leaves have them, and its send nodes can run."""

    @staticmethod
    def forward(ctx: Any, sent: Sent, indices: Sequence[int], previous: Tensor, *ends: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sent, ctx.indices = sent, indices
        return engine.empty()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = engine.running.known_as.await_gradients(ctx.sent, ctx.indices)
        return (None, None, engine.empty(), *gradients)


new_ticket: Final[Callable[..., Tensor]] = engine.directly(Ticket)

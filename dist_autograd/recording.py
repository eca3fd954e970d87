"""The edges between workers: a *send* at the worker that sends a tensor, a *recv* at the one that receives
it.

A send is for one tensor, since only some tensors of a message may take part in a backward pass. It is the
grad function of an empty tensor to which only the context refers, so that no backward pass of the user runs
it. For a leaf, the tensor itself is kept, and no node is made unless it is needed.

One recv is made for each message. All recvs lead to one leaf, the *anchor*: as one of the inputs of a pass,
it makes the engine run every recv that the pass reaches, although the gradient of the anchor is not used.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from dist_autograd import engine
from dist_autograd.device_threads import pass_of_other_thread
from dist_autograd.graph import Leaf, Mark, marks_behind
from dist_autograd.torch_internals import class_of_nodes
from rpc.errors import AutogradError, ProtocolError
from rpc.group.peer import Peer

__all__ = ["RECV_NODE", "SEND_NODE", "Origin", "Sent", "anchor", "behind", "computed_from", "receive", "send"]

_LOOK_BEHIND: Final = 128
"""Maximum number of nodes visited when a message is sent; takes about a tenth of a millisecond."""

clock: Final = itertools.count(1)
"""Numbers what is recorded in this process: later records have higher numbers."""


@functools.cache
def anchor() -> Tensor:
    """Return the leaf that all recvs lead to; it is made when an agent starts."""
    with torch.inference_mode(False):  # the caller may be in that mode
        return engine.empty(requires_grad=True)


@dataclass(slots=True, eq=False)
class Sent:
    """A message that was sent from here."""

    number: int
    """Number of the message, and the time at which it was recorded."""
    to: Peer
    ends: list[Tensor]
    """For each of its tensors that require grad: the tensor itself if it is a leaf, else the empty tensor
    whose grad function is its send node.
    """
    nodes: list[Any]
    """For each of these tensors its send node, None for a leaf."""

    def end(self, position: int) -> Tensor:
        """Return the empty tensor of a tensor's send node; for a leaf, it is made now."""
        if self.nodes[position] is not None:
            return self.ends[position]
        with torch.enable_grad():
            return _send(self.number, position, computed_from(self.ends[position]))

    def entry(self, position: int) -> GradientEdge:
        """Return the edge where a tensor's gradient enters the graph: right behind its send."""
        node = self.nodes[position]
        if node is None:
            with torch.enable_grad():
                node = computed_from(self.ends[position]).grad_fn
        return GradientEdge(*node.next_functions[0])

    def takes(self, position: int) -> bool:
        """Whether the gradient of a tensor is still needed: a leaf may have been frozen in the meantime."""
        return self.nodes[position] is not None or self.ends[position].requires_grad

    def gradients_of_leaves(
        self, indices: Sequence[int], gradients: Sequence[Tensor | None], leaves: Sequence[Leaf]
    ) -> list[Tensor | None] | None:
        """Return the gradients of the leaves that a message reaches, if no node needs to run for them.

        Args:
            indices: indices of its tensors that take part.
            gradients: gradients of all its tensors, as received.
            leaves: the leaves that it reaches.
        """
        if len(leaves) != len(indices):
            return None
        found: dict[int, Tensor] = {}
        for position in indices:
            leaf, gradient = self.ends[position], gradients[position]
            if self.nodes[position] is not None or gradient is None or id(leaf) in found:
                return None
            if leaf._backward_hooks or not leaf.requires_grad or not _is_usual(gradient, leaf):
                return None
            found[id(leaf)] = gradient
        return [found[id(leaf.tensor)] for leaf in leaves]


def _is_usual(gradient: Tensor, leaf: Tensor) -> bool:
    """Whether the engine would pass this gradient on unchanged."""
    return (
        type(gradient) is Tensor
        and gradient.layout is torch.strided
        and gradient.shape == leaf.shape
        and gradient.dtype is leaf.dtype
        and gradient.device == leaf.device
    )


def computed_from(leaf: Tensor) -> Tensor:
    """Return a tensor whose gradient is a leaf's, to be used in place of the leaf.

    PyTorch 2.13 deadlocks the whole process if one thread makes a leaf's node in the middle of an operation,
    for which it needs the GIL, while another thread that holds the GIL applies a custom function to the same
    leaf, or starts a backward pass at it, and waits for that node.
    """
    if leaf.layout is torch.strided and not leaf.is_nested:
        alias: Tensor = torch.ops.aten.alias(leaf)  # the only view that passes on sparse gradients
        return alias
    return leaf.clone()


@dataclass(slots=True, eq=False)
class Origin:
    """The origin of a recv's tensors."""

    context_id: int
    source: Peer
    sender: int
    """Incarnation of the worker that sent them."""
    message: int
    """Number of the message at the sender."""
    received: int
    """Number at which it was recorded here; see ``clock``."""
    behind: Sequence[Any] | None
    """For each of its tensors the marks that its gradient leads to, if the sender provides them; not yet
    checked, see ``marks_behind``.
    """
    answer: bool = False
    """Whether they came in an answer."""

    def marks_behind(self, tensor: int) -> list[Mark] | None:
        """Return the marks that a tensor's gradient leads to; None if the sender has not provided them.

        Raises:
            ProtocolError: what the sender has provided is malformed.
        """
        if self.behind is None:
            return None
        try:
            return [Mark(*map(index, mark)) for mark in self.behind[tensor]]
        except (TypeError, LookupError) as error:
            raise ProtocolError(
                f"worker '{self.source.name}' says badly what lies behind a tensor: {error}"
            ) from None


class Send(Function):
    """Passes on the gradient that the receiver of a tensor has sent back."""

    @staticmethod
    def forward(ctx: Any, message: int, position: int, tensor: Tensor) -> Tensor:
        ctx.materialize_grads = False
        ctx.message, ctx.position = message, position
        return engine.empty()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, None, Tensor | None]:
        return None, None, engine.running.known_as.gradient(ctx.message, ctx.position)


class Recv(Function):
    """Sends the gradients of a message's tensors to their sender."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: list[Tensor], origin: Origin) -> tuple[Tensor, ...]:
        ctx.materialize_grads = False
        ctx.origin = origin
        ctx.elsewhere = False
        for tensor in tensors:
            if not tensor.is_cpu:
                ctx.elsewhere = True
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        running = pass_of_other_thread(gradients) if ctx.elsewhere else engine.running.known_as
        if running is None:
            source = ctx.origin.source.name
            raise AutogradError(
                f"this graph goes on at worker '{source}', where a local backward cannot follow: call "
                f"dist_autograd.backward({ctx.origin.context_id}, [loss]) in place of loss.backward()"
            )
        running.post(ctx, gradients)
        return None, None, None


_send: Final[Callable[..., Tensor]] = engine.directly(Send)
_recv: Final[Callable[..., tuple[Tensor, ...]]] = engine.directly(Recv)
SEND_NODE: Final[type] = class_of_nodes(Send)
RECV_NODE: Final[type] = class_of_nodes(Recv)


def send(tensors: Sequence[Tensor], to: Peer) -> Sent:
    """Record tensors that require grad as sent."""
    if not torch.is_grad_enabled():
        with torch.enable_grad():
            return send(tensors, to)
    if engine.is_transforming():  # nodes cannot be made there; leaves need none
        engine.refuse_transforms()
    number = next(clock)
    ends: list[Tensor] = []
    nodes: list[Any] = []
    try:
        for position, tensor in enumerate(tensors):
            if tensor.is_leaf:
                ends.append(tensor)
                nodes.append(None)
            else:
                end = _send(number, position, tensor)
                ends.append(end)
                nodes.append(end.grad_fn)
    except RuntimeError:
        engine.refuse_transforms()
        raise
    return Sent(number, to, ends, nodes)


def behind(sent: Sent, context_id: int) -> list[list[Mark]] | None:
    """Return the marks that the gradient of each sent tensor leads to; None if that takes too long."""
    limit = _LOOK_BEHIND
    found: list[list[Mark]] = []
    for node in sent.nodes:
        if node is None:
            found.append([])
            continue
        marks = marks_behind(node, RECV_NODE, context_id, limit)
        if marks is None:
            return None
        found.append(marks[0])
        limit -= marks[1]
    return found


def receive(
    tensors: list[Tensor],
    context_id: int,
    source: Peer,
    message: int,
    behind: Sequence[Any] | None = None,
    *,
    answer: bool = False,
) -> tuple[Tensor, ...]:
    """Record tensors as received; returns tensors in their place that have gradient history."""
    origin = Origin(context_id, source, source.incarnation, message, next(clock), behind, answer)
    try:
        if torch.is_grad_enabled():
            return _recv(anchor(), tensors, origin)
        with torch.enable_grad():
            return _recv(anchor(), tensors, origin)
    except RuntimeError:
        engine.refuse_transforms()
        raise

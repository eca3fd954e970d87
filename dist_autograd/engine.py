"""PyTorch's autograd engine, as a backward pass between workers uses it.

*Sequence numbers.* Each node gets one when it is made; of the nodes that are ready, the engine runs the one
with the highest number first, and one with number 0 last. So a node that is held back (``hold_back``) runs
when nothing else can, provided that no other node of the pass has number 0: ``give_way`` ensures that.

*Finding the pass.* The engine runs nodes whose tensors are on the CPU on the thread that calls it, so they
find their pass by the thread. For nodes whose tensors are on a device, see ``device_threads``. (The storage
that PyTorch carries along to other threads cannot be used: process groups carry it too, and free it on
threads that may not hold the GIL.)

*The first use of an edge.* PyTorch then makes a type while it holds a lock of its own. If it releases the GIL
there, for example to collect garbage, another thread may wait for that lock while it holds the GIL, and the
process deadlocks. So an edge is used before any of our threads are started (``prepare``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, Node

from dist_autograd.torch_internals import (
    are_transforms_active,
    class_of_nodes,
    current_task,
    current_task_keeps_graph,
    run_backward,
)
from rpc.errors import AutogradError

__all__ = [
    "current_task",
    "directly",
    "empty",
    "give_way",
    "hold_back",
    "is_transforming",
    "keeps_graph",
    "prepare",
    "refuse_transforms",
    "run",
    "running",
    "set_sequence_number",
]


empty: Final[Callable[..., Tensor]] = functools.partial(torch.empty, 0, device="cpu")
"""Returns the value of nodes that have none, on the CPU whatever the default is, so that no other thread runs
them.
"""


class _Running(threading.local):
    known_as: Any = None
    """The ``known_as`` of ``run``, on the thread of a node that it runs; None elsewhere."""


running: Final = _Running()


def _some_node() -> Any:
    with torch.inference_mode(False), torch.enable_grad():  # the caller may be in either mode
        return empty(requires_grad=True).clone().grad_fn


@functools.cache
def prepare() -> None:
    """Use an edge for the first time. Called before an agent starts."""
    node = _some_node()
    no_gradient: Any = 0
    try:
        run_backward((GradientEdge(node, 0),), (no_gradient,), False, False)
    except (RuntimeError, TypeError):  # the edge has been read by then; running it would set up all devices
        return
    raise AssertionError("PyTorch took a number for a gradient")


def directly(function: type[Function]) -> Callable[..., Any]:
    """Return ``function.apply`` without its search for transforms such as ``vmap``, in which our nodes are
    not made; and its nodes call ``function.backward`` without looking for alternatives.

    These searches cost as much as making and running the node.
    """
    node: Any = class_of_nodes(function)
    node.apply = function.backward
    apply: Callable[..., Any] = super(Function, function).apply  # type: ignore[misc]
    return apply


def run(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor | GradientEdge],
    *,
    retain_graph: bool,
    accumulate: bool,
    known_as: object,
) -> Sequence[Tensor | None]:
    """Run every node between ``roots`` and ``inputs`` once, on this thread.

    Args:
        roots: edges to start from.
        gradients: one for each root.
        inputs: where to end: leaves, or edges, whose nodes do not run, except for hooks on their tensors.
        retain_graph: whether the graph can be run again.
        accumulate: whether to add the gradients of the inputs, which must be leaves, to their ``.grad``.
        known_as: the value of ``running.known_as`` for the nodes that run.

    Returns:
        The gradients of the inputs, None for an input without one; empty if ``accumulate``.
    """
    outer = running.known_as
    running.known_as = known_as
    try:
        captured = run_backward(
            tuple(roots),
            tuple(gradients),
            retain_graph,
            False,
            tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=accumulate,
        )
        return captured or ()
    finally:
        running.known_as = outer


keeps_graph: Final = current_task_keeps_graph
"""Returns whether the graph of this thread's current backward pass can be run again."""

is_transforming: Final = are_transforms_active
"""Returns whether this thread is inside a transform such as ``vmap``, where our nodes cannot be made."""


def refuse_transforms() -> None:
    """Raise ``AutogradError`` inside a transform."""
    if is_transforming():
        raise AutogradError(
            "tensors that require grad cannot be sent or received inside a transform of torch.func, such as "
            "vmap or grad: call other workers outside of it, or under torch.no_grad()"
        )


def hold_back(node: Node) -> None:
    """Make a node run only when no other node of its pass is ready."""
    node._set_sequence_nr(0)  # type: ignore[attr-defined]


def set_sequence_number(node: Node, number: int) -> None:
    """Set when a node runs: of the nodes that are ready, the one with the highest number is first."""
    node._set_sequence_nr(number)  # type: ignore[attr-defined]


def give_way(node: Node) -> None:
    """Make a node run before those that are held back."""
    if node._sequence_nr() == 0:
        node._set_sequence_nr(1)  # type: ignore[attr-defined]

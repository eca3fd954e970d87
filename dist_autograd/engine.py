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
import sys
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
    uses_of_storage,
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
    "owned",
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


def owned(gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return the same gradients, each with memory of its own and as large as its shape requires.

    The engine passes one tensor to every input of an addition, and an expanded one out of a sum; such tensors
    may also arrive from other workers. A hook may have kept its argument, and a user's function may return a
    tensor that it goes on using. Code that changes a gradient in place, as clipping does, must change only
    that one.

    Args:
        gradients: each referred to by this sequence and by nothing else, as far as the caller knows.
    """
    references_alone, _ = _alone()
    addresses: set[int] = set()
    shared: set[int] = set()
    storages: list[torch.UntypedStorage | None] = []
    for gradient, references in zip(gradients, _references(gradients), strict=True):
        elements = gradient
        if gradient is not None and not (type(gradient) is Tensor and gradient.layout is torch.strided):
            elements = _elements(gradient)
        if gradient is None or elements is None:
            storages.append(None)
            continue
        storage = elements.untyped_storage()
        storages.append(storage)
        address = storage.data_ptr()
        if (
            address in addresses
            or storage.nbytes() != elements.nbytes
            or references > references_alone
            or _is_held_by_others(gradient, elements, storage)
        ):
            shared.add(address)
        addresses.add(address)
    if not shared:
        return gradients
    return [
        gradient.detach().clone()
        if gradient is not None and storage is not None and storage.data_ptr() in shared
        else gradient
        for gradient, storage in zip(gradients, storages, strict=True)
    ]


def _elements(gradient: Tensor) -> Tensor | None:
    """Return the tensor that holds the elements of a gradient that is not strided, or is of a subclass; None
    for kinds that share no elements, or have no memory of their own.
    """
    if gradient.layout is torch.strided:
        return gradient if type(gradient).__torch_dispatch__ is Tensor.__torch_dispatch__ else None
    return gradient._values() if gradient.layout is torch.sparse_coo else None


def _references(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return the number of Python's references to each tensor."""
    return list(map(sys.getrefcount, tensors))


def _is_held_by_others(gradient: Any, elements: Tensor, storage: Any) -> bool:
    """Whether PyTorch refers to a gradient, or anything to its memory, other than through these three."""
    if gradient._use_count() > 1:
        return True
    if elements is not gradient:
        return False  # PyTorch, too, ignores other references to the values of a sparse gradient
    uses = uses_of_storage(storage._cdata)
    if uses <= _USES_ALONE:
        return False
    # The result of a transposition, as for the weight of a `Linear`, refers to the tensor that was
    # transposed.
    return uses > _USES_ALONE + 1 or gradient._base is None or _holders_of_base(gradient) > _alone()[1]


def _holders_of_base(view: Any) -> int:
    """Return the number of references of Python and PyTorch to the base of a view."""
    base = view._base
    return sys.getrefcount(base) + int(base._use_count())


_USES_ALONE: Final = 2
"""Number of uses of a storage that is not shared: the tensor, and the object from ``untyped_storage``."""


@functools.cache
def _alone() -> tuple[int, int]:
    """Return ``_references`` and ``_holders_of_base`` of a tensor without other references."""
    with torch.inference_mode(False):  # the caller may be in that mode
        view = torch.empty(1, device="cpu").view(1)
        return _references([torch.empty(1, device="cpu")])[0], _holders_of_base(view)


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

"""``DistributedDataParallel`` inside a context.

The hooks of a model that average gradients over processes are on the nodes that accumulate into ``.grad``,
and expect the gradient there. So where a pass reaches parameters of such a model, the engine accumulates, and
the accumulated gradients are moved into the context; the previous content of ``.grad`` is restored. In the
meantime the parameters are locked: no other code, such as an optimizer, may read or write their ``.grad``.

A thread that holds these locks must not wait for another worker's part of a backward pass, which may need the
locks of its own models. A pass that waits for no other worker accumulates while it runs, so that averaging
overlaps with it (``accumulating``); others hand over their gradients at the end (``hand_over``).

The models are found by their forward: from the first context that an agent knows until the agent is gone,
``DistributedDataParallel.forward`` is replaced by a function that records the model and calls PyTorch's.
(PyTorch's hooks for modules do not see a forward that is called directly.)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from dist_autograd import engine
from dist_autograd.contexts import current
from dist_autograd.parameter_locks import LockTable

__all__ = ["Models", "accumulating", "hand_over"]

Accumulate = Callable[[Sequence[GradientEdge], Sequence[Tensor]], object]
"""Runs the engine from these edges, with a gradient for each, so that it accumulates into ``.grad``."""

_patched: Final[Any] = DistributedDataParallel


class Models:
    """The models under ``DistributedDataParallel`` that were called inside contexts. From any thread.

    Attributes:
        any: whether there have been any.
        locks: locks of this worker's parameters, including those of other models.
    """

    def __init__(self) -> None:
        self.locks = LockTable()
        self._models: WeakSet[DistributedDataParallel] = WeakSet()
        self.any = False
        self._watches = False
        self._lock = threading.Lock()
        self._forward: Any = None

    def watch(self) -> None:
        """Record models from now on."""
        if self._watches:
            return
        with self._lock:
            if self._forward is None:
                self._forward = _patched.forward
                _patched.forward = self._noting(self._forward)
            self._watches = True

    def _noting(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that records the model and calls PyTorch's forward."""

        @functools.wraps(forward)
        def noted(model: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
            if current.get() is not None and model not in self._models:
                with self._lock:
                    self._models.add(model)
                    self.any = True
            return forward(model, *inputs, **kwargs)

        return noted

    def stop(self) -> None:
        """Stop recording models."""
        with self._lock:
            if self._forward is not None:
                _patched.forward = self._forward
                self._forward = None
                self._watches = False

    def among(self, leaves: Sequence[Tensor]) -> list[int]:
        """Return the positions of those leaves that are parameters of such models."""
        with self._lock:
            models = list(self._models)
        return _of(models, leaves)

    def in_buckets(self, leaves: Sequence[Tensor]) -> list[int]:
        """Return the positions of leaves whose gradients are views of buffers that the next backward
        overwrites.
        """
        with self._lock:
            models = [model for model in self._models if model.gradient_as_bucket_view]
        return _of(models, leaves)


def _of(models: Iterable[DistributedDataParallel], leaves: Sequence[Tensor]) -> list[int]:
    """Return the positions of those leaves that are parameters of some models."""
    parameters = {id(parameter) for model in models for parameter in model.module.parameters()}
    return [position for position, leaf in enumerate(leaves) if id(leaf) in parameters]


@contextmanager
def accumulating(leaves: Sequence[Tensor], models: Models, backward: object) -> Iterator[list[Tensor | None]]:
    """Lock the leaves inside the block and empty their ``.grad``, for the engine to accumulate into.

    Args:
        leaves: leaves, some of which are parameters of models.
        models: all models.
        backward: the pass that runs in the block.

    Yields:
        A list that holds the accumulated gradient of each leaf, once the block is left without an error.
    """
    accumulated: list[Tensor | None] = []
    with models.locks.of(leaves).held_by(backward):
        in_buckets = models.in_buckets(leaves)
        before = _gradients(leaves, in_buckets)
        try:
            for leaf in leaves:
                leaf.grad = None
            yield accumulated
            accumulated += _gradients(leaves, in_buckets)
        finally:
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient


def _gradients(leaves: Sequence[Tensor], copied: Iterable[int]) -> list[Tensor | None]:
    """Return the ``.grad`` of each leaf, and a copy of it at some positions."""
    gradients = [leaf.grad for leaf in leaves]
    for position in copied:
        gradient = gradients[position]
        if gradient is not None:
            gradients[position] = gradient.detach().clone()
    return gradients


def hand_over(
    leaves: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    models: Models,
    backward: object,
    accumulate: Accumulate,
) -> list[Tensor | None]:
    """Have complete gradients accumulated, so that the models' hooks run.

    Args:
        leaves: parameters without hooks of their own, which have run already.
        gradients: one for each leaf; None counts as reached, as it does in the engine.
        models: all models.
        backward: the pass.
        accumulate: runs the engine.

    Returns:
        The gradients after the hooks have run.
    """
    with torch.enable_grad():
        source = get_gradient_edge(_new_source(gradients, *leaves))
    with accumulating(leaves, models, backward) as accumulated:
        accumulate([source], [engine.empty()])
    return accumulated


class Source(Function):
    """A node that passes on gradients which have been computed before."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor | None], *leaves: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradients = gradients
        return engine.empty()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients


_new_source: Final[Callable[..., Tensor]] = Source.apply

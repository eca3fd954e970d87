"""``DistributedDataParallel`` inside a context.

Its hooks, which average gradients over processes, sit on the nodes that accumulate into ``.grad``, and look
for the gradient there. So where a pass reaches parameters of such a model, the engine accumulates, and what
it has accumulated is moved into the context; whatever was in ``.grad`` before is put back. A model can take
part in one pass at a time, which is all that its hooks can bear, so each has a lock.

Which models there are is learned from their forward: from the first context that an agent knows until the
agent is gone, ``DistributedDataParallel.forward`` is ours, which notes the model and goes on with PyTorch's.
(PyTorch's hooks for modules don't see a forward that is called as such.)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dist_autograd.contexts import current

__all__ = ["Models", "accumulating"]

_patched: Final[Any] = DistributedDataParallel


class Models:
    """The models under ``DistributedDataParallel`` that were called inside contexts. From any thread."""

    def __init__(self) -> None:
        self._locks: WeakKeyDictionary[DistributedDataParallel, threading.RLock] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._forward: Any = None

    def watch(self) -> None:
        """Learn of models from now on."""
        with self._lock:
            if self._forward is not None:
                return
            forward = self._forward = _patched.forward

        @functools.wraps(forward)
        def noted(model: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
            if current.get() is not None and model not in self._locks:
                with self._lock:
                    self._locks.setdefault(model, threading.RLock())
            return forward(model, *inputs, **kwargs)

        _patched.forward = noted

    def stop(self) -> None:
        """Learn of no more models."""
        with self._lock:
            if self._forward is not None:
                _patched.forward = self._forward
                self._forward = None

    def of(self, leaves: Sequence[Tensor]) -> list[threading.RLock]:
        """The locks of the models that have a parameter among these leaves, in an order that all keep."""
        if not self._locks:
            return []
        reached = {id(leaf) for leaf in leaves}
        with self._lock:
            models = sorted(self._locks.items(), key=lambda item: id(item[0]))
        return [
            lock
            for model, lock in models
            if any(id(parameter) in reached for parameter in model.module.parameters())
        ]


@contextmanager
def accumulating(leaves: Sequence[Tensor], locks: Sequence[Any]) -> Iterator[list[Tensor | None]]:
    """Inside the block ``.grad`` of the leaves is empty for the engine to accumulate into.

    Yields:
        A list that holds what has been accumulated for each leaf, once the block is left without an error.
    """
    accumulated: list[Tensor | None] = []
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            yield accumulated
            accumulated += [leaf.grad for leaf in leaves]
        finally:
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient

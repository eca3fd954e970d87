"""The user's functions of distributed autograd, and the object of each agent that they use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final

from torch import Tensor

from dist_autograd.backwards import Backwards
from dist_autograd.contexts import Context, Contexts, current
from dist_autograd.ddp import Models
from dist_autograd.torch_internals import INTERNALS, NO_AUTOGRAD
from rpc.errors import AutogradError
from rpc.runtime.current import current_agent, extension
from rpc.runtime.interrupts import protected

__all__ = [
    "EXTENSION",
    "Autograd",
    "autograd",
    "backward",
    "change_gradients",
    "context",
    "current_context",
    "get_gradients",
    "has_context",
]

EXTENSION: Final = "autograd"
"""Name of the agent's extension that is its ``Autograd``."""


class context:  # noqa: N801  # PyTorch's name
    """Record what calls to other workers compute inside the block, for ``backward``.

    The context applies to every call made inside it, on this thread or coroutine, and to the calls that these
    make. Leaving the block releases it on all workers.

    Returns:
        From ``with``: the context's id, an int that is the same on all workers.

    Raises:
        AutogradError: this thread is in a context already.
        NotInitializedError: ``rpc.init_rpc`` has not been called.
        ValueError: the block is left on another thread or coroutine than it was entered on. The context is
            released all the same.

    Example::

        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", torch.add, args=(x, y)).sum()
            dist_autograd.backward(context_id, [loss])
            gradients = dist_autograd.get_gradients(context_id)
            gradients[x]
    """

    _context: Context | None = None

    @protected
    def __enter__(self) -> int:
        contexts = autograd().contexts
        inside = contexts.current()
        if inside is not None:
            raise AutogradError(
                f"Already have an autograd context id for this thread: {inside.id}. Contexts do not nest: "
                "leave that one first, or use another thread"
            )
        self._context = contexts.new()
        self._token = current.set(self._context)
        return self._context.id

    @protected
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            current.reset(self._token)
        finally:
            if self._context is not None:
                self._context.contexts.release(self._context)

    def __del__(self) -> None:
        context = self._context
        if context is not None and not context.over:  # it was entered by a call of __enter__, and never left
            context.contexts.release_soon(context)


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """Compute the gradients of ``roots`` on all workers that take part, and accumulate them in the context.

    Each worker's graph is run by PyTorch's own engine, so hooks, checkpoints and custom functions work as
    they do locally. ``.grad`` is not changed. Several backward passes may run at once, even in one context.

    Args:
        context_id: the id that ``context`` returned.
        roots: the tensors to start from, each with one element and computed from a tensor that requires grad.
        retain_graph: whether to keep the graph, so that it can be used once more. Default: false.

    Raises:
        AutogradError: there is no such context, or a root cannot be used.
        BackwardError: a node of the graph raised an error; names the worker, and has the error as its cause.
        WorkerLostError: a worker that takes part is gone.

    Example::

        with dist_autograd.context() as context_id:
            loss = model(batch).sum()
            dist_autograd.backward(context_id, [loss])
    """
    check_arguments("backward", context_id, roots)
    autograd().backwards.run(context_id, roots, retain_graph)


def check_arguments(function: str, context_id: Any, roots: Any) -> None:
    """Raise ``TypeError`` unless a function was given a context's id and a list of roots."""
    is_list = type(roots) is list or (isinstance(roots, Iterable) and not isinstance(roots, Tensor))
    if type(context_id) is not int or not is_list:
        raise TypeError(
            f"{function}(): incompatible function arguments: it takes a context id (int) and a list of "
            f"tensors, not {type(context_id).__name__} and {type(roots).__name__}"
        )


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Return the gradients that backward passes in a context have computed for this worker's leaves.

    Returns:
        For each leaf its gradient, with the leaf's shape. The dict is a copy that the caller may change.

    Raises:
        AutogradError: there is no such context.

    Example::

        for parameter, gradient in dist_autograd.get_gradients(context_id).items():
            ...
    """
    return autograd().contexts.get(context_id).gradients()


def change_gradients(context_id: int, leaves: Iterable[Tensor], change: Callable[[Tensor], Tensor]) -> None:
    """Replace gradients that a context has on this worker, for example by clipped ones.

    Backward passes that would add to them wait in the meantime.

    Args:
        context_id: the id that ``context`` returned.
        leaves: the leaves whose gradients are replaced; those without a gradient are skipped.
        change: takes a gradient and returns its replacement, of the same shape; must not change it in place.

    Raises:
        AutogradError: there is no such context.

    Example::

        dist_autograd.change_gradients(context_id, [weight], lambda gradient: gradient / 2)
    """
    autograd().contexts.get(context_id).change(leaves, change)


def has_context(context_id: int) -> bool:
    """Whether this worker knows the context: made here or received with a call, and not over yet."""
    return autograd().contexts.find(context_id) is not None


def current_context() -> Context:
    """Return the context that this thread runs in.

    Raises:
        AutogradError: there is none.
        WorkerLostError: it is over, because the worker that made it is gone.
    """
    found = current.get()
    if found is not None and found.over:
        found.contexts.check(found.id, found.loss)
    if found is None or found.over:
        raise AutogradError(
            "Trying to access the autograd context of a thread that has none: make the calls inside "
            "'with dist_autograd.context() as context_id:'"
        )
    return found


class Autograd:
    """Distributed autograd on one agent.

    Args:
        models, contexts, backwards: its parts.
    """

    def __init__(self, models: Models, contexts: Contexts, backwards: Backwards) -> None:
        self.models = models
        self.contexts = contexts
        self.backwards = backwards

    def observed(self) -> dict[str, int]:
        """Return data for observers. From any thread, without waiting."""
        return {"contexts": len(self.contexts), "backwards": len(self.backwards)}

    def debug_info(self) -> dict[str, int]:
        """Counts, for ``rpc.get_debug_info``."""
        return {
            "num_autograd_contexts": len(self.contexts),
            "num_current_backward_passes": len(self.backwards),
        }


def autograd() -> Autograd:
    """Return the distributed autograd of the current agent.

    Raises:
        NotInitializedError: ``rpc.init_rpc`` has not been called.
        MissingInternalError: PyTorch lacks an internal function that distributed autograd needs.
    """
    found: Autograd | None = current_agent().extensions.get(EXTENSION)
    if found is None:
        INTERNALS.require(NO_AUTOGRAD)
        found = extension(EXTENSION)
    return found

"""Stands in for ``torch.distributed.autograd``: PyTorch's names, public and private."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

import dist_autograd
from dist_autograd.api import autograd
from dist_autograd.contexts import Context, current
from dist_autograd.recording import Sent, computed_from
from farcall.compat.torch_rpc.without_counterpart import without_counterpart
from rpc.runtime.torch_internals import is_profiler_enabled

__all__ = ["context", "is_available"]

context = dist_autograd.context
get_gradients = dist_autograd.get_gradients


def is_available() -> bool:
    """Whether distributed autograd can be used: it can."""
    return True


class SendRpcBackward:
    """A message that was sent from here, for code that inspects the graph: one node for all its tensors."""

    def __init__(self, sent: Sent) -> None:
        self._sent = sent

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """The nodes that computed the message's tensors."""
        sent = self._sent
        with torch.enable_grad():
            nodes: list[Any] = [
                computed_from(end).grad_fn if node is None else node
                for end, node in zip(sent.ends, sent.nodes, strict=True)
            ]
        return tuple(node.next_functions[0] for node in nodes)

    def name(self) -> str:
        """PyTorch's name of such a node."""
        return "torch::distributed::autograd::SendRpcBackward"


class DistAutogradContext:
    """A context, for code that inspects it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def _context_id(self) -> int:
        return self._context.id

    def _send_functions(self) -> dict[int, SendRpcBackward]:
        return {number: SendRpcBackward(sent) for number, sent in self._context.sends.items()}

    def _recv_functions(self) -> dict[int, Any]:
        return dict(enumerate(self._context.recvs))

    def _known_worker_ids(self) -> set[int]:
        return {peer.member.id for peer in self._context.told}


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """Like ``dist_autograd.backward``, with PyTorch's name in a profile."""
    if is_profiler_enabled():
        with record_function("torch::distributed::autograd::backward"):
            dist_autograd.backward(context_id, roots, retain_graph)
    else:
        dist_autograd.backward(context_id, roots, retain_graph)


def _current_context() -> DistAutogradContext:
    """Return the context of this thread."""
    return DistAutogradContext(dist_autograd.current_context())


def _retrieve_context(context_id: int) -> DistAutogradContext:
    """Return the context with an id."""
    return DistAutogradContext(autograd().contexts.get(context_id))


_entered: Final[dict[int, dist_autograd.context]] = {}
"""The blocks of new contexts, by their ids: a block without other references is left."""


def _new_context() -> DistAutogradContext:
    """A new context, which this thread is in until ``_release_context``."""
    entered = dist_autograd.context()
    _entered[entered.__enter__()] = entered
    return _current_context()


def _release_context(context_id: int) -> None:
    """End a context."""
    contexts = autograd().contexts
    found = contexts.get(context_id)
    if current.get() is found:
        current.set(None)
    contexts.release(found)
    _entered.pop(context_id, None)


def _is_valid_context(context_id: int) -> None:
    """Raise if there is no such context."""
    autograd().contexts.get(context_id)


def _init(worker_id: int) -> None:
    """Do nothing, since ``init_rpc`` does it."""
    del worker_id


def _get_max_id() -> int:
    """The largest id that a context of this worker can have."""
    return autograd().contexts.largest_id()


def _get_debug_info() -> dict[str, int]:
    """Return the numbers of contexts on this worker and of backwards in progress."""
    return dist_autograd.debug_info()


__getattr__ = without_counterpart("torch.distributed.autograd")

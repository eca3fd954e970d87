"""The private names of PyTorch that distributed autograd uses; see ``rpc/runtime/internals.py``.

If one is missing, no context can be made. Calls work, without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor
from torch.autograd import Function

from rpc.runtime.internals import Internals

__all__ = [
    "INTERNALS",
    "NO_AUTOGRAD",
    "are_transforms_active",
    "class_of_nodes",
    "current_node",
    "current_task",
    "current_task_keeps_graph",
    "inputs_of",
    "run_backward",
    "uses_of_storage",
]

INTERNALS: Final = Internals()
_find: Final = INTERNALS.find

NO_AUTOGRAD: Final = "distributed autograd does not work"

run_backward: Final[Callable[..., Sequence[Tensor | None] | None]] = _find(
    "torch.autograd:Variable._execution_engine.run_backward", NO_AUTOGRAD
)
current_task: Final[Callable[[], int]] = _find(
    "torch._C:_current_graph_task_id", NO_AUTOGRAD, instead=lambda: -1
)
"""Returns the id of the backward pass that this thread is in the middle of, or -1."""
current_node: Final[Callable[[], Any]] = _find(
    "torch._C:_current_autograd_node",
    "a distributed backward in a hook on a device hangs, where otherwise it is refused",
    instead=lambda: None,
)
"""Returns the node that this thread runs, or None."""
current_task_keeps_graph: Final[Callable[[], bool]] = _find(
    "torch._C:_autograd._get_current_graph_task_keep_graph", NO_AUTOGRAD
)
are_transforms_active: Final[Callable[[], bool]] = _find(
    "torch._C:_are_functorch_transforms_active", NO_AUTOGRAD
)
uses_of_storage: Final[Callable[[int], int]] = _find("torch._C:_storage_Use_Count", NO_AUTOGRAD)
"""Takes the ``_cdata`` of a storage and returns the number of references to it. ``Tensor._use_count`` is the
number of PyTorch's references to a tensor.
"""
INTERNALS.expect(
    "torch:Tensor._use_count",
    "torch:Tensor._base",
    "torch:Tensor._backward_hooks",
    "torch:UntypedStorage._cdata",
    "torch.autograd:Function._backward_cls",
    without=NO_AUTOGRAD,
)
# Methods of all nodes in C++.
INTERNALS.expect(
    "torch._C:_functions.CloneBackward0._sequence_nr",
    "torch._C:_functions.CloneBackward0._set_sequence_nr",
    "torch._C:_functions.CloneBackward0._input_metadata",
    without=NO_AUTOGRAD,
)


def class_of_nodes(function: type[Function]) -> type:
    """Return the class of the nodes that a function of autograd makes."""
    found: type = getattr(function, "_backward_cls", _NoNode)
    return found


class _NoNode:
    """Used as the class of nodes if PyTorch does not provide it."""


def inputs_of(node: Any) -> Sequence[Any]:
    """Return a node's input metadata: devices, dtypes and shapes."""
    found: Sequence[Any] = node._input_metadata
    return found

"""Collectives of ``torch.distributed`` on tensors on the device, in a group of one rank.

The driver is one process, so a group that takes its tensors has one rank: each collective leaves every tensor
unchanged, or copies its input to its output. Programs written for several processes run this way with one,
for example under DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from rpc.runtime.torch_internals import pytree
from spmd.engine.errors import SpmdError
from spmd.torch_internals import work_of_future

__all__ = ["collective"]

_TO_OTHERS: Final = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")
"""Operators that have no meaning in a group of one rank."""


def collective(operator: Any) -> Callable[..., Any]:
    """Return the function for an operator of the namespace ``c10d``.

    It raises :class:`SpmdError` for a group of several ranks.
    """
    schema = operator._schema
    has_input = "Tensor" in str(schema.arguments[1].type)
    returns_tensors = len(schema.returns) > 1

    def run(*args: Any) -> Any:
        if schema.name in _TO_OTHERS or _size_of_group(args) != 1:
            raise SpmdError(
                "collectives of torch.distributed take no tensors on spmd:0, those of all workers: leave "
                "them out, as DistributedDataParallel, and say with spmd.mark_sharding how tensors are "
                "sharded"
            )
        tensors = _tensors(args[0])
        if has_input:
            for output, given in zip(tensors, _tensors(args[1]), strict=True):
                output.copy_(given)
        return (args[0], _done(tensors)) if returns_tensors else _done(tensors)

    return run


def _size_of_group(args: tuple[Any, ...]) -> int:
    group = next(each for each in args if isinstance(each, torch.ScriptObject))
    return ProcessGroup.unbox(group).size()


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, Tensor)]


def _done(tensors: list[Tensor]) -> Any:
    """Work that has ended. DistributedDataParallel takes the tensors from its future."""
    future: Future[list[Tensor]] = Future()
    future.set_result(tensors)
    return work_of_future(future).boxed()

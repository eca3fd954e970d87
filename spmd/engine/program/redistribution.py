"""The moves of ``spmd.engine.program.layouts`` on a worker's shard of a tensor, over process groups.

Reductions and gathers of several tensors may be done together, and reductions may run during other
computations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spmd.engine.program.layouts import Move, plan
from spmd.engine.program.program import Layout
from spmd.torch_internals import c10d_library

__all__ = [
    "Begun",
    "Groups",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "begin_gathering",
    "begin_reducing",
    "move",
    "take_shard",
]

_REDUCTIONS: Final[dict[str, Any]] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # and a division
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class Groups(Protocol):
    """A mesh with process groups; ``DeviceMesh`` is one."""

    def get_group(self, mesh_dim: int) -> Any:
        """The process group of this worker along a dimension of the mesh."""


def move(local: Tensor, step: Move, group: Any) -> Tensor:
    """Do one move. The given tensor does not change; the result may be a view of it, or the tensor itself.

    Args:
        local: shard of this worker.
        step: the move, the same on all workers of the group except for their positions.
        group: process group along the axis.
    """
    result: Tensor = _MOVES[step.kind](local, step, group)
    return result


def all_reduce(local: Tensor, operation: str, group: Any) -> None:
    """Reduce in place, over all workers of a group."""
    options = c10d_library.AllreduceOptions()
    options.reduceOp = _REDUCTIONS[operation]
    options.asyncOp = False
    group.allreduce([local], options).wait()
    if operation == "avg":
        local.div_(group.size())


@dataclass(frozen=True, slots=True)
class Begun:
    """A collective in progress.

    Attributes:
        work: c10d's work.
        results: returns its results, once it is done.
    """

    work: Any
    results: Callable[[], list[Tensor]]

    def finish(self) -> list[Tensor]:
        """Wait for it."""
        self.work.wait()
        return self.results()


def begin_reducing(
    tensors: Sequence[Tensor], *, moves: Sequence[Move], group: Any, owned: Sequence[bool], blocks: bool
) -> Begun:
    """Begin to reduce tensors of one dtype together. They are not changed, except for owned ones.

    Args:
        tensors: tensors of one dtype.
        moves: a move for each; all are of one kind, ``reduce`` or ``reduce_scatter``, and of one operation.
        group: process group for all of them.
        owned: whether the memory of each may be used for the result.
        blocks: whether the caller waits at once.
    """
    operation = moves[0].operation
    divisor = group.size() if operation == "avg" else 1
    if moves[0].kind == "reduce_scatter":
        return _begin_scattering(tensors, moves, group, divisor, blocks)
    if len(tensors) > 1:
        flat = torch.cat([each.reshape(-1) for each in tensors])
        shapes = [each.shape for each in tensors]
        alone = None
    else:
        (alone,) = tensors
        turned = alone.dim() == 2 and not alone.is_contiguous() and alone.t().is_contiguous()
        if not owned[0] or not (turned or alone.is_contiguous()):
            alone = flat = alone.clone(memory_format=torch.contiguous_format)
        else:
            flat = alone.t() if turned else alone
    options = c10d_library.AllreduceOptions()
    options.reduceOp = _REDUCTIONS[operation]
    options.asyncOp = not blocks

    def results() -> list[Tensor]:
        if divisor > 1:
            flat.div_(divisor)
        if alone is not None:
            return [alone]
        parts = flat.split_with_sizes([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    return Begun(group.allreduce([flat], options), results)


def _begin_scattering(
    tensors: Sequence[Tensor], moves: Sequence[Move], group: Any, divisor: int, blocks: bool
) -> Begun:
    shards = [
        [_turned(each, step) for each in _shards(local, step)]
        for local, step in zip(tensors, moves, strict=True)
    ]
    shapes = [each[step.place].shape for each, step in zip(shards, moves, strict=True)]
    if len(tensors) == 1:
        parts = [each.reshape(-1) for each in shards[0]]
    else:
        parts = [torch.cat([each.reshape(-1) for each in parts]) for parts in zip(*shards, strict=True)]
    result = torch.empty_like(parts[moves[0].place])
    options = c10d_library.ReduceScatterOptions()
    options.reduceOp = _REDUCTIONS[moves[0].operation]
    options.asyncOp = not blocks

    def results() -> list[Tensor]:
        if divisor > 1:
            result.div_(divisor)
        pieces = result.split_with_sizes([shape.numel() for shape in shapes])
        found = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        return [_turned_back(each, step) for each, step in zip(found, moves, strict=True)]

    return Begun(group.reduce_scatter([result], [parts], options), results)


def _turned(local: Tensor, step: Move) -> Tensor:
    """As it is sent."""
    return local.movedim(step.dim, 0) if step.turned else local


def _turned_back(received: Tensor, step: Move) -> Tensor:
    return received.movedim(0, step.dim) if step.turned else received


def begin_gathering(
    tensors: Sequence[Tensor], *, moves: Sequence[Move], group: Any, which: Sequence[int], blocks: bool
) -> Begun:
    """Begin to gather tensors of one dtype together; each move is a ``gather`` of that group.

    Args:
        which: indices of the results, so that a tensor that is needed twice is gathered once.
        blocks: whether the caller waits at once.
    """
    dims = [0 if step.turned else step.dim for step in moves]
    rows = [_turned(each, step) for each, step in zip(tensors, moves, strict=True)]
    shapes = [
        [(*each.shape[:dim], length, *each.shape[dim + 1 :]) for length in step.lengths]
        for each, dim, step in zip(rows, dims, moves, strict=True)
    ]
    sizes = [[math.prod(shape) for shape in of_rank] for of_rank in zip(*shapes, strict=True)]
    flat = rows[0].new_empty(sum(map(sum, sizes)))
    parts = list(flat.split_with_sizes([sum(each) for each in sizes]))
    given = rows[0].reshape(-1) if len(rows) == 1 else torch.cat([each.reshape(-1) for each in rows])

    def results() -> list[Tensor]:
        pieces = [part.split_with_sizes(each) for part, each in zip(parts, sizes, strict=True)]
        found = []
        for place, (dim, of_ranks, step) in enumerate(zip(dims, shapes, moves, strict=True)):
            if len(moves) == 1 and dim == 0:
                whole = flat.view(sum(step.lengths), *of_ranks[0][1:])
            else:
                views = [each[place].view(shape) for each, shape in zip(pieces, of_ranks, strict=True)]
                whole = torch.cat(views, dim)
            found.append(_turned_back(whole, step))
        return [found[each] for each in which]

    return Begun(_all_gather(given, parts, group, blocks), results)


def all_gather(local: Tensor, outputs: list[Tensor], group: Any) -> None:
    """Gather the ``local`` of each worker into the output at its position. They may differ in size."""
    _all_gather(local, outputs, group, blocks=True).wait()


def _all_gather(local: Tensor, outputs: list[Tensor], group: Any, blocks: bool) -> Any:
    options = c10d_library.AllgatherOptions()
    options.asyncOp = not blocks
    return group.allgather([outputs], [local.contiguous()], options)


def all_to_all(gives: list[Tensor], takes: list[Tensor], group: Any) -> None:
    """Receive into ``takes`` the tensors that each worker gives to this one. They may differ in size."""
    options = c10d_library.AllToAllOptions()
    options.asyncOp = False
    group.alltoall(takes, gives, options).wait()


def _reduce(local: Tensor, step: Move, group: Any) -> Tensor:
    (result,) = begin_reducing([local], moves=[step], group=group, owned=[False], blocks=True).finish()
    return result


def _gather(local: Tensor, step: Move, group: Any) -> Tensor:
    if step.strided == 1:
        (result,) = begin_gathering([local], moves=[step], group=group, which=[0], blocks=True).finish()
        return result
    rows = local.movedim(step.dim, 0)  # whose pieces are one after another
    parts = [rows.new_empty((length, *rows.shape[1:])) for length in step.lengths]
    all_gather(rows, parts, group)
    pieces = [part.chunk(step.strided) for part in parts]
    whole = torch.cat([piece for together in zip(*pieces, strict=True) for piece in together])
    result = whole.movedim(0, step.dim)
    return result.contiguous() if local.is_contiguous() else result


def _exchange(local: Tensor, step: Move, group: Any) -> Tensor:
    gives = [each.contiguous() for each in local.split_with_sizes(list(step.lengths), step.dim)]
    mine, dim = step.lengths[step.place], step.source
    takes = []
    for length in step.source_lengths:
        shape = list(local.shape)
        shape[step.dim], shape[dim] = mine, length
        takes.append(local.new_empty(shape))
    all_to_all(gives, takes, group)
    return torch.cat(takes, dim)


def _slice(local: Tensor, step: Move, group: Any = None) -> Tensor:
    """In memory of its own: a view would keep the whole for as long as the shard lives."""
    return _shards(local, step)[step.place].clone(memory_format=torch.contiguous_format)


def _shards(local: Tensor, step: Move) -> list[Tensor]:
    if step.strided == 1:
        return list(local.split_with_sizes(list(step.lengths), step.dim))
    pieces = [each.chunk(len(step.lengths), step.dim) for each in local.chunk(step.strided, step.dim)]
    return [torch.cat(each, step.dim) for each in zip(*pieces, strict=True)]


def _part(local: Tensor, step: Move, group: Any) -> Tensor:
    if step.operation in ("max", "min", "avg") or step.place == 0:
        return local
    return torch.ones_like(local) if step.operation == "product" else torch.zeros_like(local)


_MOVES: Final[dict[str, Any]] = {
    "reduce": _reduce,
    "reduce_scatter": _reduce,
    "gather": _gather,
    "exchange": _exchange,
    "slice": _slice,
    "part": _part,
}


def take_shard(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return this worker's shard of a replicated tensor."""
    for step in plan(whole.shape, Layout(), layout, rank):
        whole = move(whole, step, None)
    return whole

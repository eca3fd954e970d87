"""Converting local tensors from one layout to another, over a process group: communication and gradients.

A layout is a placement on one mesh dimension: ``Replicate()``, ``Shard(dim)`` or ``Partial()``, a sum that is
still to be taken. Shards are cut as ``torch.chunk`` does: all of ``ceil(size / n)``, the last shorter, some
of them perhaps empty. Collectives want equal sizes, so a shorter one is padded; as what is missing is always
at the end, the padding can be cut off in one piece.

========= ============== ============== ============
from / to ``Replicate``  ``Shard(j)``   ``Partial``
========= ============== ============== ============
Replicate                slice
Shard(i)  all-gather     all-to-all
Partial   all-reduce     reduce-scatter
========= ============== ============== ============

The gradient of a replicated value is replicated, that of a shard is sharded in the same way, that of a
partial sum is replicated; so a gradient goes back by the same table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from spmd.tensor_parallel.errors import ParallelError
from spmd.tensor_parallel.site import Site
from spmd.tensor_parallel.traffic import note

__all__ = ["Finish", "chunk", "global_shape", "gradient_layout", "local_shape", "normalized", "reshard"]
__all__ += ["Reshard", "begin_reshard", "check_dim", "check_layout", "same"]

Finish: TypeAlias = Callable[[], Tensor]
"""Waits for an operation that was started and returns its result."""


@functools.cache
def same(layout: Placement) -> Placement:
    """Return the one object for all equal layouts, so that ``is`` tells whether two are equal."""
    return layout


def chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """The length and the offset of one of ``count`` shards of a dimension.

    Example::

        >>> [chunk(5, 4, index) for index in range(4)]
        [(2, 0), (2, 2), (1, 4), (0, 5)]
    """
    full = -(-size // count)
    offset = min(full * index, size)
    return min(full, size - offset), offset


def normalized(layout: Placement, dims: int) -> Placement:
    """The layout with its dimension counted from the front."""
    if isinstance(layout, Shard) and layout.dim < 0:
        return Shard(layout.dim + dims)
    return layout


def gradient_layout(layout: Placement) -> Placement:
    """Return the layout of the gradient of a value with this layout."""
    return same(Replicate()) if isinstance(layout, Partial) else layout


def check_layout(layout: Placement, what: str) -> None:
    """Is this a layout that :func:`reshard` knows?

    Raises:
        ParallelError: it is not.
    """
    known = type(layout) in (Shard, Replicate) or (type(layout) is Partial and layout.reduce_op == "sum")
    if not known:
        raise ParallelError(f"expected {what} to be Shard, Replicate or Partial('sum'), got {layout!r}")


def check_dim(layout: Placement, dims: int, what: str, site: Site) -> None:
    """Check that a tensor has the dimension that a layout shards.

    Raises:
        ParallelError: it has not.
    """
    if isinstance(layout, Shard) and not -dims <= layout.dim < dims:
        raise ParallelError(
            site.says(f"expected {what} to have a dimension for {layout!r}, got {dims} of them")
        )


def global_shape(local: Sequence[int], layout: Placement, size: int) -> tuple[int, ...]:
    """The shape of the whole of which each rank has a shard of this shape."""
    layout = normalized(layout, len(local))
    if isinstance(layout, Shard):
        return (*local[: layout.dim], local[layout.dim] * size, *local[layout.dim + 1 :])
    return tuple(local)


def local_shape(whole: Sequence[int], layout: Placement, size: int, rank: int) -> tuple[int, ...]:
    """The shape of one rank's shard of a whole of this shape."""
    layout = normalized(layout, len(whole))
    if isinstance(layout, Shard):
        length, _ = chunk(whole[layout.dim], size, rank)
        return (*whole[: layout.dim], length, *whole[layout.dim + 1 :])
    return tuple(whole)


def reshard(
    local: Tensor,
    source: Placement,
    target: Placement,
    shape: Sequence[int],
    site: Site,
    *,
    owned: bool = False,
) -> Tensor:
    """Convert a local tensor to another layout. All ranks of the site's mesh call it; autograd does not see
    it.

    Args:
        local: this rank's part, with layout ``source``.
        source: see the head of this file.
        target: see the head of this file.
        shape: shape of the whole tensor.
        site: the module that needs it.
        owned: whether ``local`` is not needed elsewhere, so that it may be overwritten.
    """
    if source is target or site.size == 1:  # told at once: this is asked four times for each layer
        return local
    return begin_reshard(local, source, target, shape, site, owned=owned)()


def begin_reshard(
    local: Tensor,
    source: Placement,
    target: Placement,
    shape: Sequence[int],
    site: Site,
    *,
    owned: bool = False,
) -> Finish:
    """Like :func:`reshard`, but return when the collective is under way."""
    if source is target or site.size == 1:
        return lambda: local
    check_dim(target, len(shape), "a tensor", site)
    source, target = normalized(source, len(shape)), normalized(target, len(shape))
    if source == target or (isinstance(source, Replicate) and isinstance(target, Partial)):
        return lambda: local
    if isinstance(source, Replicate) and isinstance(target, Shard):
        length, offset = chunk(shape[target.dim], site.size, site.rank)
        return lambda: local.narrow(target.dim, offset, length)
    if isinstance(source, Shard) and isinstance(target, Replicate):
        return _begin_all_gather(local, source.dim, shape[source.dim], site)
    if isinstance(source, Shard) and isinstance(target, Shard):
        return _begin_all_to_all(local, source.dim, target.dim, shape, site)
    if isinstance(source, Partial) and isinstance(target, Replicate):
        return _begin_all_reduce(local, site, owned)
    if isinstance(source, Partial) and isinstance(target, Shard):
        return _begin_reduce_scatter(local, target.dim, shape[target.dim], site)
    raise ParallelError(site.says(f"a tensor cannot go from {source!r} to {target!r}"))


def _begin_all_reduce(local: Tensor, site: Site, owned: bool) -> Finish:
    summed = local if owned and local.is_contiguous() else local.clone(memory_format=torch.contiguous_format)
    note(site, "all_reduce", summed)
    work = dist.all_reduce(summed, group=site.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return summed

    return finish


def _begin_all_gather(local: Tensor, dim: int, size: int, site: Site) -> Finish:
    part = _padded(local, dim, -(-size // site.size)).contiguous()
    parts = part.new_empty((site.size, *part.shape))
    note(site, "all_gather", parts)
    into = parts.flatten(0, 1) if part.ndim else parts
    work = dist.all_gather_single(into, part, group=site.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return _joined(parts, dim).narrow(dim, 0, size)

    return finish


def _begin_reduce_scatter(local: Tensor, dim: int, size: int, site: Site) -> Finish:
    full = -(-size // site.size)
    parts = _cut(_padded(local, dim, full * site.size), dim, site.size)
    part = parts.new_empty(parts.shape[1:])
    note(site, "reduce_scatter", parts)
    work = dist.reduce_scatter_single(part, parts.flatten(0, 1), group=site.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return part.narrow(dim, 0, chunk(size, site.size, site.rank)[0])

    return finish


def _begin_all_to_all(local: Tensor, source: int, target: int, shape: Sequence[int], site: Site) -> Finish:
    full = {dim: -(-shape[dim] // site.size) for dim in (source, target)}
    padded = _padded(_padded(local, source, full[source]), target, full[target] * site.size)
    sent = _cut(padded, target, site.size)
    received = torch.empty_like(sent)
    note(site, "all_to_all", sent)
    work = dist.all_to_all_single(received, sent, group=site.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        whole = _joined(received, source).narrow(source, 0, shape[source])
        return whole.narrow(target, 0, chunk(shape[target], site.size, site.rank)[0])

    return finish


def _padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    if tensor.shape[dim] == size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size
    padded = tensor.new_zeros(shape)
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded


def _cut(tensor: Tensor, dim: int, count: int) -> Tensor:
    """``[..., count * k, ...]`` as contiguous ``[count, ..., k, ...]``."""
    shape = (*tensor.shape[:dim], count, tensor.shape[dim] // count, *tensor.shape[dim + 1 :])
    return tensor.reshape(shape).movedim(dim, 0).contiguous()


def _joined(parts: Tensor, dim: int) -> Tensor:
    """The reverse of :func:`_cut`."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


class Reshard(torch.autograd.Function):
    """Plain tensors laid out anew, with gradients: ``Reshard.apply(local, source, target, site)``."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, source: Placement, target: Placement, site: Site) -> Tensor:
        check_dim(source, local.ndim, "a tensor", site)
        shape = global_shape(local.shape, source, site.size)
        ctx.back = gradient_layout(target), gradient_layout(source), shape, site
        moved = reshard(local, source, target, shape, site)
        return moved.view_as(moved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        source, target, shape, site = ctx.back
        return reshard(gradient, source, target, shape, site), None, None, None

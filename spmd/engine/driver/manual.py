"""Values that represent each worker's shard: the same memory, described in another way."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from spmd.engine.driver.aliases import Alias, read
from spmd.engine.driver.blocks import extents
from spmd.engine.driver.current import engine
from spmd.engine.driver.logical_tensor import alias_of, wrap
from spmd.engine.program.metas import Spec, contiguous_stride
from spmd.engine.program.program import FROM_LOCAL, REPLICATED, TO_LOCAL, Layout

__all__ = ["from_local", "to_local"]


def to_local(tensor: Tensor) -> Tensor:
    """Return a tensor of the shape of the largest shard, which each worker takes for its own; zeros are
    padding.
    """
    current = engine()
    with current.recorder.lock:
        value = read(current.recorder, alias_of(tensor))
        layout = value.spec.layout
        parts = [extents(value.spec.shape, layout, worker) for worker in range(current.workers)]
        shape = tuple(max(part[dim][1] for part in parts) for dim in range(len(value.spec.shape)))
        return _derived(tensor, TO_LOCAL, (shape,), shape, REPLICATED)


def from_local(tensor: Tensor, shape: Sequence[int], layout: Layout) -> Tensor:
    """Return the tensor of this shape and layout whose shards ``tensor`` represents."""
    with engine().recorder.lock:
        return _derived(tensor, FROM_LOCAL, (), tuple(shape), layout)


def _derived(
    tensor: Tensor, name: str, args: tuple[object, ...], shape: tuple[int, ...], layout: Layout
) -> Tensor:
    recorder = engine().recorder
    spec = Spec.of(shape, contiguous_stride(shape), tensor.dtype).laid_out(layout)
    return wrap(Alias(recorder.derived(name, read(recorder, alias_of(tensor)), args, spec), spec))

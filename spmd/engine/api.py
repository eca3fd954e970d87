"""The engine's interface for the public API: layouts of tensors, and their parts.

All take tensors on ``spmd.device()``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd.engine.driver.aliases import Alias, Value, read, write
from spmd.engine.driver.blocks import extents, has_blocks
from spmd.engine.driver.current import engine
from spmd.engine.driver.logical_tensor import LogicalTensor, alias_of, wrap
from spmd.engine.program.metas import spec_of
from spmd.engine.program.program import Layout

__all__ = [
    "constrain",
    "flush",
    "is_logical",
    "load_local_parts",
    "local_parts",
    "redistributed",
    "upload",
    "upload_data",
    "uploaded_with",
    "value_layout",
    "workers_count",
]


def workers_count() -> int:
    """Return the number of workers.

    Raises:
        NotInSpmdModeError: no ``use_spmd``.
    """
    return engine().workers


def is_logical(tensor: object) -> bool:
    """Whether it is a tensor on ``spmd.device()``."""
    return isinstance(tensor, LogicalTensor)


def value_layout(tensor: Tensor) -> Layout:
    """Return a tensor's current layout. This runs nothing."""
    recorder = engine().recorder
    with recorder.lock:
        return read(recorder, alias_of(tensor)).spec.layout


def constrain(tensor: Tensor, layout: Layout) -> None:
    """Change a tensor's layout, in place.

    A tensor that has not been uploaded yet is uploaded with this layout; otherwise it is redistributed.
    Autograd does not record it, since the value is the same. Changes in place keep the layout of the tensor,
    so that a parameter keeps its own. For a view, only its present value gets the layout, not the base.
    """
    recorder = engine().recorder
    alias = alias_of(tensor)
    with recorder.lock:
        value = recorder.moved(read(recorder, alias), layout)
        alias.value, alias.spec = value, alias.spec.laid_out(layout)


def redistributed(tensor: Tensor, layout: Layout) -> Tensor:
    """Return the same tensor with another layout, as a new one that shares no memory; without autograd.

    Example::

        class Constrain(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, layout):
                ctx.layout = layout
                return redistributed(x, layout)

            @staticmethod
            def backward(ctx, gradient):
                return redistributed(gradient, ctx.layout), None
    """
    recorder = engine().recorder
    alias = alias_of(tensor)
    with recorder.lock:
        value = recorder.moved(read(recorder, alias), layout)
        return wrap(Alias(value, alias.spec.laid_out(layout)))


def local_parts(tensor: Tensor, workers: Sequence[int] | None = None) -> list[Tensor]:
    """Return each worker's local tensor, or those of some workers, in their order; waits for them.

    Uneven shards have the lengths that they have on the workers: nothing is padded. The local tensors of a
    ``Partial`` tensor are the terms of the sum.

    Raises:
        OperationError: an operation recorded earlier has failed.
        WorkerLostError: a worker is gone.
    """
    current = engine()
    with current.recorder.lock:
        value = read(current.recorder, alias_of(tensor))
        workers = range(current.workers) if workers is None else workers
        parts = current.fetch_parts(value, workers)
    return [parts[worker] for worker in workers]


def load_local_parts(tensor: Tensor, parts: Sequence[Tensor]) -> None:
    """Replace a tensor's content, shard by shard; the whole tensor exists nowhere.

    Args:
        tensor: a tensor with a layout of blocks (``Shard`` and ``Replicate``), not partial.
        parts: CPU tensors by worker, of the shapes that ``local_parts`` returns. They are taken over.

    Raises:
        ValueError: their number or shapes differ.
    """
    current = engine()
    alias = alias_of(tensor)
    with current.recorder.lock:
        layout = read(current.recorder, alias).spec.layout
        if not has_blocks(layout):
            raise ValueError(f"expected a tensor that is laid out in blocks, got {layout.placements}")
        if len(parts) != current.workers:
            raise ValueError(f"expected {current.workers} parts, one for each worker, got {len(parts)}")
        for worker, part in enumerate(parts):
            wanted = [length for _, length in extents(alias.spec.shape, layout, worker)]
            if list(part.shape) != wanted:
                raise ValueError(f"expected worker {worker}'s part of shape {wanted}, got {list(part.shape)}")
        spec = alias.spec.dense().laid_out(layout)
        value = Value(spec, data=[part.detach().to(spec.dtype).contiguous() for part in parts])
        write(current.recorder, alias, value)


def uploaded_with(data: Tensor, layout: Layout) -> Tensor:
    """Return a tensor with this content, which has this layout from the beginning.

    Args:
        data: tensor on the CPU; copied.
    """
    data = data.detach().clone(memory_format=torch.preserve_format)
    spec = spec_of(data, layout)
    return wrap(Alias(Value(spec, data=data), spec))


def flush() -> None:
    """Make workers start with what is recorded, without waiting for them."""
    engine().recorder.flush()


def upload(tensor: Tensor) -> None:
    """Send a tensor's content to the workers now, if it is still on the driver, instead of on its
    first use.
    """
    recorder = engine().recorder
    with recorder.lock:
        recorder.send(read(recorder, alias_of(tensor)))


def upload_data(tensor: Tensor) -> None:
    """Like ``upload``, but does nothing for computed tensors, and for those that are on the workers."""
    value = alias_of(tensor).value
    if value is not None and value.data is not None:
        upload(tensor)

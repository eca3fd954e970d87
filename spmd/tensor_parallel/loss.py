"""Cross entropy on logits whose classes are sharded: they are never gathered.

For a sample with logits ``x`` and weights ``q`` of the classes, the loss is ``sum(q * (lse - x))``, where
``lse`` is the logarithm of the sum of the exponentials. ``q`` is the class's weight at the target and 0
elsewhere; smoothing mixes in all classes; class probabilities give it themselves. With ``Q = sum(q)``, and
all numbers taken relative to the largest logit, which changes nothing:

    loss = Q * lse - sum(q * x)        gradient = Q * softmax(x) - q

So three sums over the classes are needed, ``exp(x)``, ``q * x`` and (for probabilities) ``q``: one all-reduce
for the largest logit, one for all sums together, none backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from spmd.tensor_parallel.errors import ParallelError, UnsupportedModuleError
from spmd.tensor_parallel.flow import plain
from spmd.tensor_parallel.resharding import chunk
from spmd.torch_internals import reduction_name

__all__ = ["loss_parallel"]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """In this block, cross entropy takes logits that are sharded by classes.

    ``F.cross_entropy`` and ``nn.CrossEntropyLoss`` with a ``DTensor`` input are computed on shards;
    everything else, plain logits and other uses of ``log_softmax`` included, is as ever. It holds for this
    thread, may be nested, and ``backward`` may be called inside or outside.

    The input has classes in dimension 1 (0 if it has only one), sharded by exactly one dimension of the mesh;
    others may shard other dimensions or replicate. Targets are class indices, laid out as the input without
    its classes, or class probabilities of the input's shape; plain ones are taken to be the same on all
    ranks. ``weight`` is replicated. ``ignore_index``, ``label_smoothing`` and all reductions are taken.

    The result is a ``DTensor``: of reduction ``none`` laid out like targets, of ``sum`` partial over mesh
    dimensions that shard samples, of ``mean`` replicated.

    Raises (from the loss):
        ParallelError: input or target are laid out otherwise.

    Example::

        parallelize_module(head, mesh, ColwiseParallel(use_local_output=False))
        with loss_parallel():
            F.cross_entropy(head(x), target).backward()
    """
    with _Intercepted():
        yield


class _Intercepted(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.cross_entropy:
            given = args[0] if args else kwargs.get("input")
            if isinstance(given, DTensor):
                return _cross_entropy(*args, **kwargs)
        return function(*args, **kwargs)


def _here() -> str:
    """Return the beginning of error messages."""
    return f"rank {dist.get_rank()}, loss_parallel()"


@dataclass(frozen=True)
class _Layout:
    """How logits are laid out: classes over one dimension of the mesh, samples perhaps over others."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    class_dim: int
    mesh_dim: int

    @classmethod
    def of(cls, logits: DTensor) -> _Layout:
        class_dim = 1 if logits.ndim >= 2 else 0
        placements = logits.placements
        sharding = [dim for dim, each in enumerate(placements) if each.is_shard(class_dim)]
        if len(sharding) != 1:
            raise ParallelError(
                f"{_here()} requires exactly one mesh dim to shard tensor "
                f"dimension {class_dim}, but got placements {placements} "
                f"with {len(sharding)} such mesh dim(s)."
            )
        for dim, each in enumerate(placements):
            if dim != sharding[0] and not (each.is_shard() or each.is_replicate()):
                raise ParallelError(
                    f"{_here()} expects non-TP mesh dims to be Shard or Replicate, got {each} at dim {dim}."
                )
        return cls(logits.device_mesh, placements, logits.shape, class_dim, sharding[0])

    @property
    def classes(self) -> int:
        return self.shape[self.class_dim]

    @property
    def slice(self) -> tuple[int, int]:
        """Length and offset of this rank's classes."""
        return chunk(self.classes, self.mesh.size(self.mesh_dim), self.mesh.get_local_rank(self.mesh_dim))

    @property
    def target(self) -> tuple[Placement, ...]:
        """How one number for each sample is laid out."""
        placements: list[Placement] = []
        for dim, each in enumerate(self.placements):
            if dim == self.mesh_dim:
                placements.append(Replicate())
            elif isinstance(each, Shard) and each.dim > self.class_dim:
                placements.append(Shard(each.dim - 1))
            else:
                placements.append(each)
        return tuple(placements)

    @property
    def over_samples(self) -> list[int]:
        """The dimensions of the mesh that shard samples."""
        return [dim for dim, each in enumerate(self.target) if each.is_shard()]

    def all_reduce(self, tensor: Tensor, dims: Sequence[int], op: Any = dist.ReduceOp.SUM) -> Tensor:
        for dim in dims:
            dist.all_reduce(tensor, op, group=self.mesh.get_group(dim))
        return tensor

    def local(self, tensor: Tensor, placements: tuple[Placement, ...], what: str) -> Tensor:
        """This rank's part of a tensor that must be laid out so; a plain one is taken to be replicated."""
        if isinstance(tensor, DTensor):
            if tensor.placements != placements:
                raise ParallelError(f"{_here()}, {what}: Expected {placements} but got {tensor.placements}.")
            return plain(tensor)
        if any(each.is_shard() for each in placements):
            raise ParallelError(
                f"{_here()} requires a DTensor (not a plain torch.Tensor) as "
                f"{what}, laid out as {placements}: wrap it with DTensor.from_local or distribute_tensor"
            )
        return tensor


@dataclass(frozen=True)
class _Options:
    ignore_index: int
    reduction: str
    smoothing: float


def _cross_entropy(
    input: DTensor,  # noqa: A002 - as F.cross_entropy calls it
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    if size_average is not None or reduce is not None:
        reduction = reduction_name(size_average, reduce)
    if reduction not in ("none", "sum", "mean"):
        raise ParallelError(f"{_here()}: expected reduction none, sum or mean, got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ParallelError(f"{_here()}: expected label_smoothing from 0 to 1, got {label_smoothing}")
    layout = _Layout.of(input)
    options = _Options(ignore_index, reduction, label_smoothing)
    if target.shape == input.shape and target.is_floating_point():
        held = _local_probabilities(target, layout)
    else:
        expected = layout.shape[: layout.class_dim] + layout.shape[layout.class_dim + 1 :]
        held = layout.local(target, layout.target, "target")
        if target.shape != expected or target.is_floating_point():
            raise ParallelError(
                f"{_here()}: expected a target of class indices with shape {[*expected]}, or of "
                f"probabilities with shape {[*input.shape]}, got {target.dtype} with shape {[*target.shape]}"
            )
    weights = None
    if weight is not None:
        weights = layout.local(weight, (Replicate(),) * layout.mesh.ndim, "weight")
        if weights.shape != (layout.classes,):
            raise ParallelError(
                f"{_here()}: expected weights of {layout.classes} classes, got {weights.shape}"
            )
    arguments = input, held, weights, layout, options
    result: Tensor = _CrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def _local_probabilities(target: Tensor, layout: _Layout) -> Tensor:
    if target.requires_grad:
        raise UnsupportedModuleError("loss_parallel() gives no gradient to class probabilities: detach them")
    if isinstance(target, DTensor):
        return plain(target.redistribute(placements=layout.placements))
    others = tuple(each for dim, each in enumerate(layout.placements) if dim != layout.mesh_dim)
    layout.local(target, others, "target")
    length, offset = layout.slice
    return target.narrow(layout.class_dim, offset, length)


class _CrossEntropy(torch.autograd.Function):
    """Logits, local target, all weights, layout, options to loss. See the head of this file."""

    @staticmethod
    def forward(
        ctx: Any, logits: DTensor, target: Tensor, weights: Tensor | None, layout: _Layout, options: _Options
    ) -> DTensor:
        x = plain(logits).movedim(layout.class_dim, -1)
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        length, offset = layout.slice
        largest = x.amax(-1) if length else x.new_full(x.shape[:-1], -torch.inf)
        layout.all_reduce(largest, [layout.mesh_dim], dist.ReduceOp.MAX)
        x = x - largest.unsqueeze(-1)
        exponentials = x.exp()
        terms = _Indices if target.dim() == x.dim() - 1 and not target.is_floating_point() else _Probabilities
        own = weights.narrow(0, offset, length).to(x.dtype) if weights is not None else None
        held = terms(x, target, weights, own, layout, options)
        sums = torch.stack([exponentials.sum(-1), held.products, held.totals])
        layout.all_reduce(sums, [layout.mesh_dim])
        total, products, totals = sums.unbind()
        losses = totals * total.log() - products
        losses = held.masked(losses)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), totals)
        ctx.held, ctx.layout, ctx.options = held, layout, options
        ctx.dtype, ctx.divisor = logits.dtype, None
        return _reduced(ctx, losses, held.count())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: DTensor) -> tuple[Tensor | None, ...]:
        softmax, totals = ctx.saved_tensors
        layout: _Layout = ctx.layout
        if ctx.options.reduction == "none":
            gradient = gradient.redistribute(placements=layout.target)
        scale = plain(gradient).to(softmax.dtype)
        if ctx.divisor is not None:
            scale = scale / ctx.divisor
        scale = ctx.held.masked(scale.expand(totals.shape))
        result = softmax * (scale * totals).unsqueeze(-1)
        ctx.held.subtract(result, scale)
        local = result.to(ctx.dtype).movedim(-1, layout.class_dim).contiguous()
        wrapped = DTensor.from_local(
            local,
            layout.mesh,
            layout.placements,
            run_check=False,
            shape=layout.shape,
            stride=torch.empty(layout.shape, device="meta").stride(),
        )
        return wrapped, None, None, None, None


def _reduced(ctx: Any, losses: Tensor, count: Tensor) -> DTensor:
    layout: _Layout = ctx.layout
    whole = layout.shape[: layout.class_dim] + layout.shape[layout.class_dim + 1 :]
    if ctx.options.reduction == "none":
        placements, result = layout.target, losses
    else:
        whole = torch.Size()
        placements, result = (Replicate(),) * layout.mesh.ndim, losses.sum()
        if ctx.options.reduction == "mean":
            both = layout.all_reduce(torch.stack([result, count.to(result)]), layout.over_samples)
            result, ctx.divisor = both[0] / both[1], both[1]
        else:
            placements = tuple(Partial() if each.is_shard() else Replicate() for each in layout.target)
    return DTensor.from_local(
        result.to(ctx.dtype),
        layout.mesh,
        placements,
        run_check=False,
        shape=whole,
        stride=torch.empty(whole, device="meta").stride(),
    )


class _Indices:
    """The sums over this rank's classes where targets are indices."""

    def __init__(
        self,
        x: Tensor,
        target: Tensor,
        weights: Tensor | None,
        own: Tensor | None,
        layout: _Layout,
        options: _Options,
    ) -> None:
        length, offset = layout.slice
        self._ignored = target == options.ignore_index
        safe = target.masked_fill(self._ignored, 0)
        if safe.numel() and not 0 <= int(safe.min()) <= int(safe.max()) < layout.classes:
            raise IndexError(
                f"{_here()}: expected targets from 0 to {layout.classes - 1}, "
                f"got {int(target.min())} to {int(target.max())}"
            )
        self._others = (safe < offset) | (safe >= offset + length)
        self._index = (safe - offset).masked_fill_(self._others, 0).unsqueeze(-1)
        self._weights = torch.ones_like(safe, dtype=x.dtype) if weights is None else weights.to(x.dtype)[safe]
        self._weighted = (1 - options.smoothing) * self._weights.masked_fill(self._others, 0)
        self._smooth = options.smoothing / layout.classes
        self._own = own
        at_target = x.gather(-1, self._index).squeeze(-1) if length else x.new_zeros(safe.shape)
        self.products = self._weighted * at_target.masked_fill(self._others, 0)
        self.totals = self._weighted.clone()
        if self._smooth:
            self.products += self._smooth * (x.sum(-1) if own is None else x @ own)
            self.totals += self._smooth * (length if own is None else own.sum())

    def masked(self, numbers: Tensor) -> Tensor:
        return numbers.masked_fill(self._ignored, 0)

    def count(self) -> Tensor:
        return self._weights.masked_fill(self._ignored, 0).sum()

    def subtract(self, gradient: Tensor, scale: Tensor) -> None:
        """Take off ``scale * q``."""
        if gradient.shape[-1]:
            gradient.scatter_add_(-1, self._index, (-scale * self._weighted).unsqueeze(-1))
        if self._smooth:
            smooth = self._smooth * scale.unsqueeze(-1)
            gradient -= smooth if self._own is None else smooth * self._own


class _Probabilities:
    """The sums over this rank's classes where targets are probabilities."""

    def __init__(
        self,
        x: Tensor,
        target: Tensor,
        weights: Tensor | None,
        own: Tensor | None,
        layout: _Layout,
        options: _Options,
    ) -> None:
        q = target.movedim(layout.class_dim, -1).to(x.dtype)
        q = q * (1 - options.smoothing) + options.smoothing / layout.classes
        self._q = q if own is None else q * own
        self.products = (self._q * x).sum(-1)
        self.totals = self._q.sum(-1)

    def masked(self, numbers: Tensor) -> Tensor:
        return numbers

    def count(self) -> Tensor:
        return torch.tensor(self.totals.numel())

    def subtract(self, gradient: Tensor, scale: Tensor) -> None:
        gradient -= scale.unsqueeze(-1) * self._q

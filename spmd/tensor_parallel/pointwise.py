"""Modules that compute each position of a sequence separately, on sequence shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from spmd.tensor_parallel.flow import gradient_of, plain
from spmd.tensor_parallel.random_numbers import dropout_mask
from spmd.tensor_parallel.resharding import check_dim, global_shape
from spmd.tensor_parallel.site import Site
from spmd.tensor_parallel.traffic import note

__all__ = ["SequenceFlow", "sequence_forward"]


@dataclass(frozen=True, eq=False)
class SequenceFlow:
    """The layouts of a module's input and output.

    Attributes:
        site: site of the module.
        sharding: sharding of the sequence.
        local_output: whether the output is returned as a plain tensor, otherwise as a ``DTensor``.
        independent: whether a dropout's mask is drawn on each rank separately.
    """

    site: Site
    sharding: Shard
    local_output: bool
    independent: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceFlow:
        return self

    def is_local(self, module: nn.Module, dims: int | None = None) -> bool:
        """Whether a module runs on local tensors: if its result is then what one process would compute."""
        forward = type(module).forward
        if forward is nn.Dropout.forward:
            return True
        if forward not in (nn.LayerNorm.forward, nn.RMSNorm.forward):
            return False
        kept = len(cast("nn.LayerNorm", module).normalized_shape)
        dim = self.sharding.dim
        return -kept > dim if dim < 0 else dims is None or dim < dims - kept


def sequence_forward(own: Callable[..., Any], self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """In place of a module's forward; the sequence comes first, or is called ``input`` or ``x``."""
    flow: SequenceFlow = self._tensor_parallel  # type: ignore[assignment]
    given, rest = flow.site.first_input(args, kwargs)
    check_dim(flow.sharding, given.ndim, "the input", flow.site)
    dim = flow.sharding.dim % given.ndim
    sharding = (Shard(dim),)
    if isinstance(given, DTensor) and given.placements != sharding:
        given = given.redistribute(placements=sharding, async_op=True)
    if not rest and not kwargs and flow.is_local(self, given.ndim):
        return _locally(flow, self, given, dim)
    if not isinstance(given, DTensor):
        given = DTensor.from_local(given, flow.site.mesh, sharding, run_check=False)
    result = own(self, given, *rest, **kwargs)
    return result.to_local() if flow.local_output and isinstance(result, DTensor) else result


def _locally(flow: SequenceFlow, module: nn.Module, given: Tensor, dim: int) -> Tensor:
    sharding = Shard(dim)
    if isinstance(given, DTensor):
        local, shape, strides = given.to_local(), tuple(given.shape), given.stride()
    else:
        local, shape = given, global_shape(given.shape, sharding, flow.site.size)
        strides = None
    if isinstance(module, nn.Dropout):
        result = _dropped(flow, module, local, dim, shape, strides)
    else:
        result = _normed(flow.site, cast("nn.LayerNorm | nn.RMSNorm", module), local)
    if flow.local_output:
        return result
    if strides is None:
        return DTensor.from_local(result, flow.site.mesh, (sharding,), run_check=False)
    return DTensor.from_local(
        result, flow.site.mesh, (sharding,), run_check=False, shape=torch.Size(shape), stride=strides
    )


def _dropped(
    flow: SequenceFlow,
    module: nn.Dropout,
    local: Tensor,
    dim: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
) -> Tensor:
    if not module.training or module.p == 0 or local.numel() == 0 == torch.Size(shape).numel():
        return local
    if module.p == 1:  # nothing is drawn
        return local * 0
    return local * dropout_mask(local, module.p, dim, shape, strides, flow.site, independent=flow.independent)


def _normed(site: Site, module: nn.LayerNorm | nn.RMSNorm, local: Tensor) -> Tensor:
    parameters = [module.weight, getattr(module, "bias", None)]
    held = [each for each in parameters if each is not None]
    replicated = iter(_Replicated.apply(site, *held) if held else ())  # type: ignore[no-untyped-call]
    weight, bias = (None if each is None else next(replicated) for each in parameters)
    if isinstance(module, nn.LayerNorm):
        return functional.layer_norm(local, module.normalized_shape, weight, bias, module.eps)
    return functional.rms_norm(local, module.normalized_shape, weight, module.eps)


class _Replicated(torch.autograd.Function):
    """Replicated parameters as plain tensors; their gradients are summed over the ranks, all at once."""

    @staticmethod
    def forward(ctx: Any, site: Site, *parameters: DTensor) -> tuple[Tensor, ...]:
        ctx.site, ctx.specs = site, [each._spec for each in parameters]
        return tuple(plain(each).view_as(plain(each)) for each in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        if not any(needed):
            return (None,) * (1 + len(gradients))
        wanted = [each for each, need in zip(gradients, needed, strict=True) if need]
        together = torch.cat([each.reshape(-1) for each in wanted])
        note(ctx.site, "all_reduce", together)
        dist.all_reduce(together, group=ctx.site.group)
        summed = iter(together.split([each.numel() for each in wanted]))  # type: ignore[no-untyped-call]
        return None, *(
            gradient_of(spec, next(summed).view(gradient.shape)) if need else None
            for spec, gradient, need in zip(ctx.specs, gradients, needed, strict=True)
        )

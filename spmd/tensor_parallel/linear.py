"""``nn.Linear`` on local shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

from spmd.tensor_parallel.flow import REPLICATE, Flow, gradient_of, plain

__all__ = ["linear_forward"]


def linear_forward(self: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear calls it
    """Replaces ``nn.Linear.forward``, if the module has a flow."""
    flow: Flow = self._tensor_parallel  # type: ignore[assignment]
    flow.site.check_input(input)
    if isinstance(input, DTensor) and input.placements != (flow.wanted_in(input.ndim),):
        input = input.redistribute(placements=(flow.wanted,))  # noqa: A001
    weight = flow.parameter(self.weight, "weight", flow.weight)
    flow.check_place(input, weight)
    bias = None
    if self.bias is not None:
        placement = REPLICATE if isinstance(flow.natural, Partial) else flow.weight
        bias = flow.parameter(self.bias, "bias", placement)
    result: Tensor = _Linear.apply(input, weight, bias, flow)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    """Input, weight, bias, flow to output. The gradient of the input is reduced while others are computed."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: DTensor, bias: DTensor | None, flow: Flow) -> Tensor:
        held, shape, was_distributed = flow.take_in(given, weight.shape[1])
        local_weight = plain(weight)
        local_bias = plain(bias) if bias is not None and flow.holds_bias else None
        ctx.dtypes = held.dtype, local_weight.dtype
        if torch.is_autocast_enabled(held.device.type):
            dtype = torch.get_autocast_dtype(held.device.type)
            held, local_weight = held.to(dtype), local_weight.to(dtype)
            local_bias = None if local_bias is None else local_bias.to(dtype)
        ctx.save_for_backward(held, local_weight)
        ctx.flow, ctx.shape, ctx.was_distributed = flow, shape, was_distributed
        ctx.specs = weight._spec, None if bias is None else bias._spec
        ctx.output_shape = (*shape[:-1], weight.shape[0])
        return flow.give_out(functional.linear(held, local_weight, local_bias), ctx.output_shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        flow: Flow = ctx.flow
        held, weight = ctx.saved_tensors
        input_dtype, weight_dtype = ctx.dtypes
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gradient = flow.gradient_in(gradient, ctx.output_shape)
        of_input = of_weight = of_bias = finish = None
        if needs_input:
            computed = torch.matmul(gradient, weight).to(input_dtype)
            finish = flow.begin_gradient_out(computed, ctx.shape, ctx.was_distributed)
        rows = _as_rows(gradient)
        weight_spec, bias_spec = ctx.specs
        if needs_weight:
            of_weight = gradient_of(weight_spec, torch.mm(rows.t(), _as_rows(held)).to(weight_dtype))
        if needs_bias:
            of_bias = gradient_of(bias_spec, rows.sum(0).to(weight_dtype))
        if finish is not None:
            of_input = finish()
        return of_input, of_weight, of_bias, None


def _as_rows(tensor: Tensor) -> Tensor:
    if tensor.ndim == 2:
        return tensor
    return tensor.flatten(0, -2) if tensor.ndim > 2 else tensor.unsqueeze(0)

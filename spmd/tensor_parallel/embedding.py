"""``nn.Embedding`` on local shards: of the vectors (colwise), or of the vocabulary (rowwise)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from spmd.tensor_parallel.flow import Flow, gradient_of, plain
from spmd.tensor_parallel.resharding import chunk

__all__ = ["embedding_forward"]


def embedding_forward(self: nn.Embedding, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Embedding calls it
    """Replaces ``nn.Embedding.forward``, if the module has a flow."""
    flow: Flow = self._tensor_parallel  # type: ignore[assignment]
    flow.site.check_input(input)
    if isinstance(input, DTensor) and input.placements != (flow.wanted,):
        input = input.redistribute(placements=(flow.wanted,))  # noqa: A001
    weight = flow.parameter(self.weight, "weight", flow.weight)
    flow.check_place(input, weight)
    options = self.padding_idx, self.scale_grad_by_freq
    result: Tensor = _Embedding.apply(input, weight, *options, flow)  # type: ignore[no-untyped-call]
    return result


class _Embedding(torch.autograd.Function):
    """Indices, weight, padding index, scaling by frequency, flow to vectors."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: DTensor, padding: int | None, scaled: bool, flow: Flow
    ) -> Tensor:
        indices, shape, _ = flow.take_in(given, None)
        rows, local_weight = weight.shape[0], plain(weight)
        if indices.numel():
            lowest, highest = (int(each) for each in torch.aminmax(indices))
            if lowest < 0 or highest >= rows:
                raise IndexError(
                    flow.site.says(f"expected indices from 0 to {rows - 1}, got {lowest} to {highest}")
                )
        nobodys = local_weight.shape[0]  # a row too many, for gradients that are not ours or of the padding
        if flow.weight == Shard(0):
            length, offset = chunk(rows, flow.site.size, flow.site.rank)
            own = indices - offset
            others = (own < 0) | (own >= length)
            if length:
                found = functional.embedding(own.masked_fill(others, 0), local_weight)
                found.masked_fill_(others.unsqueeze(-1), 0)
            else:
                found = local_weight.new_zeros((*indices.shape, local_weight.shape[1]))
            own = own.masked_fill_(others, nobodys)
            padding = None if padding is None else padding - offset
        else:
            own, found = indices, functional.embedding(indices, local_weight)
        if padding is not None:
            own = own.masked_fill(own == padding, nobodys)
        ctx.save_for_backward(own)
        ctx.spec, ctx.rows, ctx.scaled, ctx.flow = weight._spec, local_weight.shape[0], scaled, flow
        ctx.shape = (*shape, weight.shape[1])
        return flow.give_out(found, ctx.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None, None, None, None
        gradient = ctx.flow.gradient_in(gradient, ctx.shape)
        rows = ctx.rows
        local = torch.ops.aten.embedding_dense_backward(gradient, own, rows + 1, rows, ctx.scaled)[:rows]
        return None, gradient_of(ctx.spec, local), None, None, None

"""Operators that are recorded as compositions of others: fused ones that exist for other devices alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["decomposition"]

_COMPOSITIONS: Final[dict[str, Callable[..., Any]]] = {}


def decomposition(op: Any) -> Callable[..., Any] | None:
    """The composition for an overload, if it has one."""
    return _COMPOSITIONS.get(op.name())


def _composition(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _COMPOSITIONS[f"aten::{name}"] = function
        return function

    return register


@_composition("_thnn_fused_lstm_cell")
def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The hidden state, the cell's, and the four gates for backward: ``(batch, 4 * width)``."""
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + (input_bias + hidden_bias)
    into, forget, cell, out = gates.chunk(4, 1)
    into, forget, cell, out = into.sigmoid(), forget.sigmoid(), cell.tanh(), out.sigmoid()
    cy = forget * cx + into * cell
    return out * cy.tanh(), cy, torch.cat((into, forget, cell, out), 1)


@_composition("_thnn_fused_lstm_cell_backward_impl")
def _lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the gates, of the cell's old state, and of the biases."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    into, forget, cell, out = workspace.chunk(4, 1)
    bent = cy.tanh()
    grad_out = torch.zeros_like(cx) if grad_hy is None else grad_hy * bent * out * (1 - out)
    grad_cell = torch.zeros_like(cx) if grad_hy is None else grad_hy * out * (1 - bent * bent)
    if grad_cy is not None:
        grad_cell = grad_cell + grad_cy
    grad_gates = torch.cat(
        (
            grad_cell * cell * into * (1 - into),
            grad_cell * cx * forget * (1 - forget),
            grad_cell * into * (1 - cell * cell),
            grad_out,
        ),
        1,
    )
    return grad_gates, grad_cell * forget, grad_gates.sum(0) if has_bias else None


@_composition("_thnn_fused_gru_cell")
def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The hidden state, and for backward ``(batch, 5 * width)``."""
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    from_input, from_hidden = input_gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    reset = (from_input[0] + from_hidden[0]).sigmoid()
    update = (from_input[1] + from_hidden[1]).sigmoid()
    new = (from_input[2] + reset * from_hidden[2]).tanh()
    workspace = torch.cat((reset, update, new, hx, from_hidden[2]), 1)
    return new + update * (hx - new), workspace


@_composition("_thnn_fused_gru_cell_backward")
def _gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of the gates from input and hidden state, of the old hidden state, and of the biases."""
    reset, update, new, hx, from_hidden = workspace.chunk(5, 1)
    grad_new = grad_hy * (1 - update) * (1 - new * new)
    grad_update = grad_hy * (hx - new) * update * (1 - update)
    grad_reset = grad_new * from_hidden * reset * (1 - reset)
    grad_input = torch.cat((grad_reset, grad_update, grad_new), 1)
    grad_hidden = torch.cat((grad_reset, grad_update, grad_new * reset), 1)
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    return grad_input, grad_hidden, grad_hy * update, *biases

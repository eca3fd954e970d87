"""Where results lie: batches stay sharded, targets keep their place, and what is moved is told."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from spmd.engine.driver.operators import propagate
from spmd.engine.program.program import REPLICATED, Layout, MeshKey, Meta
from spmd.engine.rules.catalog import decomposition

aten: Any = torch.ops.aten
LINE: Final = MeshKey((0, 1), (2,))
SQUARE: Final = MeshKey((0, 1, 2, 3), (2, 2))


def on(mesh: MeshKey, *placements: Placement) -> Layout:
    return Layout(mesh, placements)


def meta(*shape: int, layout: Layout = REPLICATED) -> Meta:
    return Meta(shape, torch.empty(shape, device="meta").stride(), torch.float32, layout)


ROWS: Final = on(LINE, Shard(0))


def test_whole_tensors_stay_whole() -> None:
    told = propagate(aten.mm.default, (meta(8, 4), meta(4, 2)), {})
    assert told.inputs == (REPLICATED, REPLICATED)
    assert told.results == (REPLICATED,)
    assert told.note is None


@pytest.mark.parametrize("weight", [REPLICATED, on(LINE, Shard(0)), on(LINE, Shard(1))])
def test_a_sharded_batch_stays_and_weights_come_to_it(weight: Layout) -> None:
    told = propagate(aten.mm.default, (meta(8, 4, layout=ROWS), meta(4, 2, layout=weight)), {})
    assert told.inputs == (ROWS, REPLICATED)
    assert told.results == (ROWS,)
    assert (told.note is None) == (weight == REPLICATED)


@pytest.mark.parametrize("bias", [REPLICATED, ROWS])
def test_layouts_are_the_same_for_numbers_that_may_change_from_run_to_run(bias: Layout) -> None:
    args = meta(4, layout=bias), meta(4, 8), meta(8, layout=ROWS)
    told = [propagate(aten.addmv.default, args, {"beta": beta}) for beta in (0, 1, 2)]
    assert told[0] == told[1] == told[2]


def test_batch_and_model_may_be_sharded_at_once() -> None:
    x = meta(8, 4, layout=on(SQUARE, Shard(0), Replicate()))
    weight = meta(4, 2, layout=on(SQUARE, Replicate(), Shard(1)))
    told = propagate(aten.mm.default, (x, weight), {})
    assert told.results == (on(SQUARE, Shard(0), Shard(1)),)
    assert told.note is None


def test_a_batch_of_images_stays_sharded_through_batch_norm() -> None:
    x = meta(8, 4, 3, 3, layout=ROWS)
    args = (x, meta(4), meta(4), meta(4), meta(4), True, 0.1, 1e-5)
    told = propagate(aten._native_batch_norm_legit_functional.default, args, {})
    assert told.results == (ROWS, *(REPLICATED,) * 4)
    assert told.note is None


def test_a_result_in_place_lies_where_its_target_does() -> None:
    args = (meta(8, 4, layout=ROWS), meta(8, 4, layout=on(LINE, Shard(1))))
    told = propagate(aten.add_.Tensor, args, {})
    assert told.inputs == (ROWS, ROWS)
    assert told.results == (ROWS,)


def test_gradients_that_are_sums_come_to_their_weights() -> None:
    columns, summed = on(LINE, Shard(1)), on(LINE, Partial())
    weights = [meta(8, 4, layout=columns), meta(3)]
    grads = [meta(8, 4, layout=summed), meta(3, layout=summed)]
    told = propagate(aten._foreach_add_.List, (weights, grads), {"alpha": -0.1})
    assert told.inputs == (columns, REPLICATED) * 2
    assert told.results == (columns, REPLICATED)


def test_sums_in_a_list_stay_sharded_along_other_axes() -> None:
    grads = [meta(8, 4, layout=on(SQUARE, Partial(), Shard(1))), meta(3, layout=on(SQUARE, *[Partial()] * 2))]
    told = propagate(aten._foreach_norm.Scalar, (grads,), {})
    assert told.inputs == (on(SQUARE, Replicate(), Shard(1)), REPLICATED)
    assert told.results == (REPLICATED, REPLICATED)


def test_of_two_meshes_the_one_with_more_bytes_stays() -> None:
    other = MeshKey((1, 0), (2,))
    args = (meta(8, 4, layout=ROWS), meta(1, 4, layout=on(other, Shard(1))))
    told = propagate(aten.add.Tensor, args, {})
    assert told.results == (ROWS,)
    assert told.note is not None
    assert "several meshes" in told.note


def test_what_has_no_rule_is_not_tried_in_all_ways() -> None:
    many = [meta(2, 3, 4, layout=ROWS) for _ in range(8)]
    told = propagate(aten._chunk_cat.default, (many, 0, 2), {})
    assert told.results == (REPLICATED,)
    assert told.note is not None
    assert "it has no rule" in told.note


def test_what_has_no_rule_is_done_whole_and_told() -> None:
    told = propagate(aten.nonzero.default, (meta(8, 4, layout=ROWS),), {})
    assert told.inputs == (REPLICATED,)
    assert told.results == (REPLICATED,)
    assert told.note is not None
    assert "aten::nonzero is done with whole tensors on every worker" in told.note


# ---- compositions


def cell_gradients(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Of a recurrent cell: PyTorch's, and those of its fused operator as a composition."""
    torch.manual_seed(0)
    parts = {"lstm": 4, "gru": 3}[kind]
    x, hidden = torch.randn(3, 5), torch.randn(3, 5)
    weights = [torch.randn(parts * 5, 5, requires_grad=True) for _ in range(2)]
    biases = [torch.randn(parts * 5, requires_grad=True) for _ in range(2)]
    gates = [x @ weights[0].t(), hidden @ weights[1].t()]
    if kind == "lstm":
        state = torch.randn(3, 5, requires_grad=True)
        outputs: tuple[Tensor, ...] = torch._VF.lstm_cell(x, (hidden, state), *weights, *biases)
        wanted = [state]
    else:
        state = torch.randn(3, 5, requires_grad=True)
        gates[1] = state @ weights[1].t()
        outputs = (torch._VF.gru_cell(x, state, *weights, *biases),)
        wanted = []
    grads = [torch.randn_like(each) for each in outputs]
    expected = torch.autograd.grad(outputs, [*biases, *wanted], grads)
    forward, backward = (decomposition(getattr(aten, name).default) for name in _CELLS[kind])
    assert forward is not None
    assert backward is not None
    with torch.no_grad():
        *found, workspace = forward(*gates, state, *biases)
        if kind == "lstm":
            by_gates, by_state, by_bias = backward(*grads, state, found[1], workspace, True)
            gradients = [by_gates.sum(0), by_bias, by_state]
        else:
            *_, by_input, by_hidden = backward(*grads, workspace, True)
            gradients = [by_input, by_hidden]
    return [*outputs, *expected], [*found, *gradients]


_CELLS: Final = {
    "lstm": ("_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl"),
    "gru": ("_thnn_fused_gru_cell", "_thnn_fused_gru_cell_backward"),
}


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_fused_cells_are_composed(kind: str) -> None:
    expected, found = cell_gradients(kind)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)

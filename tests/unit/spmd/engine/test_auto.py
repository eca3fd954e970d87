"""Shardings chosen by cost, on recorded programs; no processes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

from spmd.engine.auto.cost import Costs, cost_of
from spmd.engine.auto.search import candidates, choose_layouts
from spmd.engine.program.program import REPLICATED, Layout, MeshKey, Program
from tests.unit.spmd.engine.recorded import Recorder, Value

aten: Any = torch.ops.aten
MESH = MeshKey((0, 1, 2, 3), (4,))
ROWS, COLUMNS = Layout(MESH, (Shard(0),)), Layout(MESH, (Shard(1),))


def trained_mlp(batch: int, width: int, hidden: int) -> tuple[Program, dict[int, int]]:
    """One step of SGD: inputs are rows, two weights."""
    at = Recorder()
    x = at.input(torch.randn(batch, width))
    up, down = at.input(torch.randn(width, hidden)), at.input(torch.randn(hidden, width))
    inside = at.op(aten.mm.default, x, up)
    active = at.op(aten.relu.default, inside)
    out = at.op(aten.mm.default, active, down)
    grad = at.op(aten.sub.Tensor, out, x)
    grad_down = at.op(aten.mm.default, at.op(aten.t.default, active), grad)
    back = at.op(aten.mm.default, grad, at.op(aten.t.default, down))
    masked = at.op(aten.threshold_backward.default, back, inside, 0)
    grad_up = at.op(aten.mm.default, at.op(aten.t.default, x), masked)
    updated = [at.op(aten.add.Tensor, *each, alpha=-0.1) for each in ((up, grad_up), (down, grad_down))]
    return at.program(updated), {up.index: updated[0].index, down.index: updated[1].index}


def embedded(vocabulary: int, width: int, tokens: int) -> Program:
    at = Recorder()
    table, indices = at.input(torch.randn(vocabulary, width)), at.input(torch.randint(vocabulary, (tokens,)))
    weight = at.input(torch.randn(width, width))
    found = at.op(aten.embedding.default, table, indices)
    return at.program([at.op(aten.mm.default, found, weight)])


def attention(batch: int, length: int, width: int) -> Program:
    """One head, and the layer behind it."""
    at = Recorder()
    x: Value = at.input(torch.randn(batch, length, width))
    weights = [at.input(torch.randn(width, width)) for _ in range(4)] + [
        at.input(torch.randn(width, 4 * width)),
        at.input(torch.randn(4 * width, width)),
    ]

    def linear(t: Value, weight: Value) -> Value:
        flat = at.op(aten.view.default, t, [batch * length, t.meta.shape[-1]])
        made = at.op(aten.mm.default, flat, weight)
        return at.op(aten.view.default, made, [batch, length, weight.meta.shape[1]])  # type: ignore[no-any-return]

    query, key, value = (linear(x, each) for each in weights[:3])
    scores = at.op(aten.bmm.default, query, at.op(aten.transpose.int, key, 1, 2))
    mixed = at.op(aten.bmm.default, at.op(aten._softmax.default, scores, -1, False), value)
    x = at.op(aten.add.Tensor, x, linear(mixed, weights[3]))
    inside = at.op(aten.relu.default, linear(x, weights[4]))
    return at.program([at.op(aten.add.Tensor, x, linear(inside, weights[5]))])


MLP, UPDATES = trained_mlp(64, 16, 32)
PLANS = {
    "wide": (*trained_mlp(8, 64, 512), [[ROWS, REPLICATED, REPLICATED], [REPLICATED, COLUMNS, ROWS]]),
    "long": (*trained_mlp(512, 16, 32), [[ROWS, REPLICATED, REPLICATED], [REPLICATED, COLUMNS, ROWS]]),
    "embedding": (
        embedded(4096, 32, 16),
        {},
        [[REPLICATED, ROWS, REPLICATED], [ROWS, REPLICATED, REPLICATED]],
    ),
    "attention": (
        attention(8, 4, 16),
        {},
        [
            [ROWS] + [REPLICATED] * 6,
            [REPLICATED, COLUMNS, COLUMNS, COLUMNS, ROWS, COLUMNS, ROWS],
        ],
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_is_found_costs_no_more_than_plans_by_hand(name: str) -> None:
    program, updates, plans = PLANS[name]
    chosen = choose_layouts(program, MESH, updates=updates)
    assert chosen.cost.total < chosen.whole.total
    for plan in plans:
        assert chosen.cost.total <= cost_of(program, plan, updates).total


@pytest.mark.parametrize("shape", [(4,), pytest.param((2, 2), marks=pytest.mark.nightly)])
def test_all_combinations_are_no_better_than_descent(shape: tuple[int, ...]) -> None:
    """Of a mesh of two dimensions there are too many to be all tried."""
    mesh, costs = MeshKey((0, 1, 2, 3), shape), Costs(MLP, UPDATES)
    every = itertools.product(*(map(costs.number, candidates(meta, mesh)) for meta in MLP.inputs))
    least = min(costs.of(plan).total for plan in every)
    found = choose_layouts(MLP, mesh, updates=UPDATES)
    assert found.cost.total == least
    assert found == choose_layouts(MLP, mesh, updates=UPDATES)


def test_a_long_batch_is_cut_and_wide_weights_are() -> None:
    program, updates, _ = PLANS["long"]
    assert choose_layouts(program, MESH, updates=updates).layouts[0] == ROWS
    program, updates, _ = PLANS["wide"]
    assert choose_layouts(program, MESH, updates=updates).layouts[1:] == (COLUMNS, ROWS)


def test_what_the_user_has_fixed_stays() -> None:
    assert choose_layouts(MLP, MESH, fixed={1: ROWS}, updates=UPDATES).layouts[1] == ROWS


def test_bytes_on_the_wire_are_those_of_rings() -> None:
    at = Recorder()
    x, w = at.input(torch.randn(8, 16)), at.input(torch.randn(16, 4))
    product = at.op(aten.mm.default, x, w)
    program = at.program([at.op(aten.relu.default, product)])
    assert cost_of(program, [REPLICATED, REPLICATED]).wire == 0
    assert cost_of(program, [ROWS, REPLICATED]).wire == 0
    assert cost_of(program, [COLUMNS, ROWS]).wire == 2 * 3 / 4 * (8 * 4 * 4)  # one all-reduce


def test_candidates_leave_no_worker_without_a_part() -> None:
    square = MeshKey((0, 1, 2, 3), (2, 2))
    meta = MLP.inputs[0]
    assert len(candidates(meta, square)) == 9
    short = at_most_two().inputs[0]
    assert all(each.placements != (Shard(0), Shard(0)) for each in candidates(short, square))
    assert Layout(square, (Shard(0), Replicate())) in candidates(short, square)


def at_most_two() -> Program:
    at = Recorder()
    return at.program([at.input(torch.randn(2, 8))])

"""Programs run on the parts of real workers, over process groups of their own."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from spmd.engine.program.program import REPLICATED, Layout, MeshKey
from spmd.engine.worker.interpreter import LinkedProgram
from tests.support.process_groups import process_group
from tests.support.serving import in_processes
from tests.support.workers import Worker
from tests.unit.spmd.engine.recorded import Recorder, Value, compare_part, part_of

aten: Any = torch.ops.aten
LINE = MeshKey((0, 1), (2,))


def run_and_compare(recorder: Recorder, outputs: list[Value], mesh: DeviceMesh) -> None:
    """Twice, since passes come with the second run."""
    rank = mesh.get_rank()
    linked = LinkedProgram(recorder.program(outputs), rank, lambda key: mesh)
    for _ in range(2):
        parts = [part_of(each.whole, each.meta, rank) for each in recorder.inputs]
        for part, value in zip(linked.run(parts, ()), outputs, strict=True):
            compare_part(part, value, rank)


def moves() -> tuple[Recorder, list[Value]]:
    """From any layout to any, of even and uneven shapes."""
    kinds: list[Placement] = [Replicate(), Shard(0), Shard(1), Partial(), Partial("max")]
    recorder, outputs = Recorder(), list[Value]()
    wholes = [recorder.input(torch.randn(shape)) for shape in ((4, 6), (5, 3), (1, 2))]
    for whole, source, target in itertools.product(wholes, kinds, kinds):
        laid_out = recorder.redistribute(whole, Layout.of(LINE, (source,)))
        moved = recorder.redistribute(laid_out, Layout.of(LINE, (target,)))
        if not (source.is_partial() and target.is_partial() and source != target):
            outputs += [moved, recorder.redistribute(moved, REPLICATED)]
    return recorder, outputs


def a_step(weights: Layout) -> tuple[Recorder, list[Value]]:
    """A training step of a layer with batch norm, by hand."""
    recorder, rows = Recorder(), Layout(LINE, (Shard(0),))
    x, target = recorder.input(torch.randn(6, 4), rows), recorder.input(torch.randint(4, (6,)), rows)
    weight, momentum = (recorder.input(torch.randn(4, 4), weights) for _ in range(2))
    scale, shift = recorder.input(torch.randn(4)), recorder.input(torch.randn(4))
    mean, variance = recorder.input(torch.zeros(4)), recorder.input(torch.ones(4))
    op = recorder.op
    hidden = op(aten.mm.default, x, op(aten.t.default, weight))
    args: tuple[Any, ...] = (hidden, scale, shift, mean, variance, True, 0.1, 1e-5)
    normed, saved, inverse, mean, variance = op(aten._native_batch_norm_legit_functional.default, *args)
    scores = op(aten._log_softmax.default, normed, 1, False)
    loss, total = op(aten.nll_loss_forward.default, scores, target, None, 1, -100)
    one = op(aten.ones_like.default, loss)
    grad = op(aten.nll_loss_backward.default, one, scores, target, None, 1, -100, total)
    grad = op(aten._log_softmax_backward_data.default, grad, scores, 1, torch.float32)
    args = (grad, hidden, scale, None, None, saved, inverse, True, 1e-5, [True] * 3)
    grad, *grads = op(aten.native_batch_norm_backward.default, *args)
    by_weight = op(aten.t.default, op(aten.mm.default, op(aten.t.default, x), grad))
    (momentum,) = op(aten._foreach_add.List, [momentum], [by_weight])
    weight, scale = op(aten._foreach_add.List, [weight, scale], [momentum, grads[0]], alpha=-0.1)
    return recorder, [loss, mean, variance, momentum, weight, scale]


@in_processes(2)
def test_programs_on_workers(worker: Worker) -> None:
    with process_group(worker):
        mesh = DeviceMesh("cpu", [0, 1])
        for build in (moves, lambda: a_step(REPLICATED), lambda: a_step(Layout(LINE, (Shard(0),)))):
            torch.manual_seed(0)
            run_and_compare(*build(), mesh)

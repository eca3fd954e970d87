"""When parameters are whole, of a model that is wrapped layer by layer, and what a worker then holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spmd
from spmd.engine.driver import current
from spmd.engine.program.program import REDISTRIBUTE, REPLICATED
from spmd.fsdp import FSDPv2, checkpoint_module
from tests.support.spmd_simulated import SimulatedWorker, peak_memory, simulated_session

pytestmark = pytest.mark.logical_device

WORKERS = 4
WIDTH = 1088
LAYER = WIDTH * WIDTH * 4
"""Bytes of a layer's weight: more than what is gathered ahead."""


class Stack(nn.Module):
    """Layers, of which activations are few bytes beside weights."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def wrapped(layers: int) -> nn.Module:
    mesh = spmd.Mesh(range(WORKERS), (WORKERS,), ("fsdp",))
    model = Stack(layers)
    model.layers = nn.ModuleList(FSDPv2(each, mesh=mesh) for each in model.layers)
    return FSDPv2(model, mesh=mesh)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    mesh = spmd.Mesh(range(WORKERS), (WORKERS,), ("fsdp",))
    x = torch.zeros(WORKERS, WIDTH).to(current.DEVICE)
    spmd.mark_sharding(x, mesh, ("fsdp", None))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def held(worker: SimulatedWorker) -> int:
    assert worker.engine is not None
    return sum(each.untyped_storage().nbytes() for each in worker.engine.values.values())


def peak_of_a_step(layers: int) -> tuple[int, int]:
    """What a worker holds between steps, and by how much that grows in one."""
    with simulated_session(WORKERS) as (session, (worker, *_)):
        model = wrapped(layers)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True)
        for _ in range(3):
            train(model, optimizer)
            session.sync()

        def step() -> None:
            train(model, optimizer)
            session.sync()

        grows = peak_memory(step)
        return held(worker), grows


def test_whole_weights_of_a_step_are_as_many_whatever_the_number_of_layers() -> None:
    (held_by_few, few), (held_by_many, many) = peak_of_a_step(4), peak_of_a_step(8)
    shards = 4 * LAYER // WORKERS
    assert held_by_many - held_by_few == 2 * shards  # weights, momentum
    assert many - few < shards + LAYER // 4  # gradients, which are cut as well


class Repeated(nn.Module):
    """A layer that is used several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x).relu()
        return x


def gathers(loss_of: Callable[[nn.Module, Tensor], None], module: nn.Module | None = None) -> int:
    """How often the weight of a wrapped module is gathered."""
    with simulated_session(WORKERS, computes=False) as (session, (worker, *_)):
        mesh = spmd.Mesh(range(WORKERS), (WORKERS,), ("fsdp",))
        model = FSDPv2(module or Repeated(), mesh=mesh)
        x = torch.zeros(WORKERS, 8).to(current.DEVICE)
        spmd.mark_sharding(x, mesh, ("fsdp", None))
        loss_of(model, x)
        session.sync()
        programs = [each.definition for each in worker.steps if each.definition is not None]
        instructions = [each for program in programs for each in program.instructions]
        moved = [each.args[1] for each in instructions if each.operator == REDISTRIBUTE]
        return moved.count(REPLICATED)


def test_a_weight_is_gathered_for_forward_and_for_backward_however_often_it_is_used() -> None:
    assert gathers(lambda model, x: model(x).sum().backward()) == 2


def test_each_backward_over_a_graph_gathers_anew() -> None:
    def twice(model: nn.Module, x: Tensor) -> None:
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert gathers(twice) == 3


def test_without_gradients_a_weight_is_gathered_once() -> None:
    def evaluate(model: nn.Module, x: Tensor) -> None:
        with torch.no_grad():
            current.engine().kept = model(x)  # type: ignore[attr-defined]

    assert gathers(evaluate) == 1


def test_what_checkpoint_computes_again_is_gathered_for_that() -> None:
    def again(model: nn.Module, x: Tensor) -> None:
        checkpoint(model, x.requires_grad_(), use_reentrant=False).sum().backward()

    assert gathers(again) == 2


def test_what_a_module_inside_computes_again_is_gathered_for_that() -> None:
    assert gathers(lambda model, x: model(x).sum().backward(), checkpoint_module(Repeated())) == 2

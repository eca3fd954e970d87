"""Shardings that ``use_spmd(auto=True)`` chooses, on real workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.support.serving import in_group, serve
from tests.support.workers import RunWorkers, Worker

pytestmark = pytest.mark.processes


def mlp(width: int, hidden: int) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))


def train(
    model: nn.Module, device: torch.device, batch: int, look: Callable[[Tensor, Any], None] | None = None
) -> list[Any]:
    """Losses of some steps, and parameters.

    Args:
        look: shown the last batch, and the optimizer.
    """
    found: list[Any] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(batch, 16, generator=generator).to(device)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    if look is not None:
        look(x, optimizer)
    return found + [each.detach().cpu() for each in model.parameters()]


def wide_layers_are_cut(worker: Worker) -> None:
    spmd.use_spmd(auto=True)
    model = mlp(16, 64).to(spmd.device())
    assert spmd.auto_plan() is None

    def look(x: Tensor, optimizer: Any) -> None:
        shardings = [getattr(each, "sharding_spec") for each in model.parameters()]  # noqa: B009
        assert shardings[0] == "{devices=[2,1]0,1}"
        assert shardings[2] == "{devices=[1,2]0,1}"
        state = optimizer.state[model[0].weight]["exp_avg"]
        assert state.sharding_spec == shardings[0]

    found = train(model, spmd.device(), 8, look)
    plan = spmd.auto_plan()
    assert plan is not None
    assert plan.held_after < plan.held_before
    changed = [each for each in plan.lines if each.kind == "changed"]
    assert [each.shape for each in changed] == [(64, 16), (64,), (16, 64), (16,)]
    assert (changed[0].bytes_before, changed[0].bytes_after) == (4096, 2048)
    assert "[64, 16] changed: {devices=[2,1]0,1}, 4096 to 2048 bytes" in str(plan)
    torch.testing.assert_close(found, train(mlp(16, 64), torch.device("cpu"), 8))
    spmd.shutdown()


def later_batches_are_cut_and_marks_stay(worker: Worker) -> None:
    spmd.use_spmd(auto=True)
    model = mlp(16, 32).to(spmd.device())
    mesh = spmd.get_1d_mesh("all")
    spmd.mark_sharding(model[0].weight, mesh, (None, None))
    spmd.mark_sharding(model[2].weight, mesh, ("all", None))

    def look(x: Tensor, optimizer: Any) -> None:
        assert getattr(x, "sharding_spec") == "{devices=[2,1]0,1}"  # noqa: B009
        assert getattr(model[0].weight, "sharding_spec") == "{replicated}"  # noqa: B009
        assert getattr(model[2].weight, "sharding_spec") == "{devices=[2,1]0,1}"  # noqa: B009
        other = torch.randn(3, 16).to(spmd.device())
        assert getattr(other, "sharding_spec") == ""  # noqa: B009

    found = train(model, spmd.device(), 1024, look)
    plan = spmd.auto_plan()
    assert plan is not None
    assert [each.fixed for each in plan.lines if len(each.shape) == 2] == [True, False, True]
    torch.testing.assert_close(found, train(mlp(16, 32), torch.device("cpu"), 1024))
    spmd.shutdown()


def nothing_is_chosen_unless_parameters_change(worker: Worker) -> None:
    spmd.use_spmd(auto=True)
    model = mlp(16, 64).to(spmd.device())
    x = torch.randn(8, 16).to(spmd.device())
    model(x).cpu()
    x.mul_(2)
    spmd.sync()
    assert spmd.auto_plan() is None
    spmd.shutdown()
    with pytest.raises(spmd.engine.errors.NotInSpmdModeError):
        spmd.auto_plan()


@pytest.mark.parametrize(
    "body",
    [
        wide_layers_are_cut,
        later_batches_are_cut_and_marks_stay,
        nothing_is_chosen_unless_parameters_change,
    ],
)
def test_auto(run_workers: RunWorkers, body: Callable[[Worker], None]) -> None:
    run_workers([in_group(body), serve, serve], time_limit=90)

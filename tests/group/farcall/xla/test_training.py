"""Training under XLA's names."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

from tests.group.farcall.xla.names import IN_ORDER, SimpleLinear, mesh_of, said, theirs
from tests.group.spmd.driven import WORKERS, driven

pytestmark = pytest.mark.processes


def train(model: nn.Module, device: str, steps: int = 3, feed: Any = None) -> list[float]:
    """The losses of some steps."""
    x, found = theirs(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        data, wanted = torch.randn(16, 128).to(device), torch.zeros(16, 1).to(device)
        if feed is not None:
            feed(data)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data), wanted)
        torch.autograd.backward(loss)
        optimizer.step()
        if device == "xla":
            x.xm.mark_step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("way", ["one layer", "batch", "rows", "columns and rows"])
@driven
def test_losses_are_those_of_one_process(way: str) -> None:
    x = theirs()
    alone = SimpleLinear()
    model: Any = copy.deepcopy(alone).to(x.xm.xla_device())
    mesh, feed = mesh_of(WORKERS, 1), None
    if way == "one layer":
        x.xs.mark_sharding(model.fc1.weight, mesh_of(1, WORKERS), (0, 1))
    if way == "rows":
        x.xs.mark_sharding(model.fc1.weight, mesh, (0, 1))
        x.xs.mark_sharding(model.fc2.weight, mesh, (1, 0))
    if way == "columns and rows":
        x.xs.mark_sharding(model.fc1.weight, mesh, (0, 1))
        x.xs.mark_sharding(model.fc2.weight, mesh, (1, 0))
    if way in ("batch", "rows"):

        def feed(data: torch.Tensor) -> None:
            x.xs.mark_sharding(data, mesh, (0, 1))

    before = said(model.fc1.weight)
    found = train(model, "xla", feed=feed)
    torch.testing.assert_close(found, train(alone, "cpu"), rtol=1e-5, atol=1e-5)
    if before:
        assert said(model.fc1.weight) == before
    torch.testing.assert_close(model.fc1.weight.detach().cpu(), alone.fc1.weight.detach())


@driven
def test_a_linear_layer_may_be_theirs_and_gradients_may_have_a_barrier() -> None:
    x = theirs()
    model: Any = SimpleLinear().to("xla")
    x.xs.apply_xla_patch_to_nn_linear(model, x.xs.xla_patched_nn_linear_forward)
    x.xs.xla_sharding.apply_backward_optimization_barrier(model.fc2)
    data = torch.randn(2, 128)
    torch.autograd.backward(model(data.to("xla")).sum())
    hidden = torch.relu(data @ model.fc1.weight.detach().cpu().T + model.fc1.bias.detach().cpu())
    torch.testing.assert_close(model.fc2.weight.grad.cpu(), hidden.sum(0, keepdim=True))


@driven
def test_activations_are_computed_again() -> None:
    theirs()
    checkpoint = importlib.import_module("torch_xla.utils.checkpoint").checkpoint
    model: Any = SimpleLinear().to("xla")
    data = torch.randn(2, 128).to("xla").requires_grad_()
    torch.autograd.backward(checkpoint(model, data).sum())
    again, model.fc1.weight.grad = model.fc1.weight.grad, None
    torch.autograd.backward(model(data).sum())
    assert model.fc1.weight.grad.cpu().equal(again.cpu())


@driven
def test_what_follows_from_marked_data_is_cut_to_the_loss() -> None:
    x = theirs()
    model: Any = SimpleLinear().to("xla")
    data = torch.randn(8, 128).to("xla")
    x.xs.mark_sharding(data, mesh_of(WORKERS, 1), (0, 1))
    output = model(data)
    assert said(output) == f"{{devices=[4,1]{IN_ORDER}}}"
    torch.autograd.backward(output.sum())
    x.torch_xla.sync()
    assert said(model.fc1.weight.grad) == "{replicated}"

"""Tensors on the logical device in files of ``torch.save``, and files restored there."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from tests.group.spmd.driven import driven

pytestmark = pytest.mark.processes


def reloaded(value: object, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


@driven
def test_a_state_dict_is_restored_where_map_location_says() -> None:
    model = nn.Linear(4, 2).to(spmd.device())
    mesh = spmd.Mesh(range(4), (4,), ("data",))
    spmd.mark_sharding(model.weight, mesh, (None, "data"))
    state = model.state_dict()
    assert {t.device for t in reloaded(state).values()} == {spmd.device()}
    for place in ("cpu", torch.device("cpu"), {"spmd:0": "cpu"}):
        found = reloaded(state, map_location=place)
        assert all(t.device.type == "cpu" and torch.equal(t, state[name].cpu()) for name, t in found.items())
    assert reloaded(state, map_location=spmd.device())["weight"].device == spmd.device()


@driven
def test_a_saved_module_has_parameters_again() -> None:
    model = nn.Linear(4, 2).to(spmd.device())
    model.bias.requires_grad_(False)
    found = reloaded(model, weights_only=False)
    assert isinstance(found.weight, nn.Parameter)
    assert [each.requires_grad for each in found.parameters()] == [True, False]
    assert torch.equal(found.weight.cpu(), model.weight.cpu())
    found(torch.ones(1, 4, device=spmd.device())).sum().backward()
    assert found.weight.grad is not None


@driven
def test_a_file_of_the_cpu_is_restored_on_the_device() -> None:
    content = {"a": torch.arange(6.0).view(2, 3).t(), "b": nn.Parameter(torch.ones(2)), "c": torch.ones(0)}
    content["d"] = content["a"][1:]
    found = reloaded(content, map_location=spmd.device())
    for name, t in content.items():
        assert found[name].device == spmd.device()
        assert torch.equal(found[name].cpu(), t)
    assert isinstance(found["b"], nn.Parameter)

"""What ``explain`` says."""

from __future__ import annotations

import io

import torch
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import spmd
from spmd.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.group.spmd.meshes import in_mesh


def lines(shown: object) -> list[list[str]]:
    """The words of each line, without the frame."""
    console = Console(file=io.StringIO(), width=120)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue().translate(dict.fromkeys(map(ord, "│┃"), " "))
    return [line.split() for line in text.splitlines()]


@in_mesh(2)
def test_parameters_and_collectives(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    before = lines(spmd.explain(model))
    after = lines(spmd.explain(model, torch.ones(4, 6, requires_grad=True)))
    assert all(parameter.grad is None for parameter in model.parameters())
    for said in (before, after):
        assert ["0.weight", *["10", "x", "6"], "Shard(dim=0)", *["5", "x", "6"], "120", "B"] in said
        assert ["2.weight", *["6", "x", "10"], "Shard(dim=1)", *["6", "x", "5"], "120", "B"] in said
        assert ["2.bias", "6", "Replicate()", "6", "24", "B"] in said
        assert ["all", "284", "B"] in said
    assert ["2", "forward", "all_reduce", "1", "96", "B"] in after
    assert ["0", "backward", "all_reduce", "1", "96", "B"] in after
    assert not any("all_reduce" in line for line in before)


@in_mesh(2)
def test_collectives_of_dtensors(mesh: DeviceMesh) -> None:
    layer = parallelize_module(nn.Linear(6, 6), mesh, ColwiseParallel())
    sharded = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    said = lines(spmd.explain(layer, sharded))
    assert ["(DTensors)", "forward", "all_gather_into_tensor", "1", "96", "B"] in said

"""A sharded model, and saving and loading its state by planners."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

import spmd
from tests.group.spmd.driven import WORKERS


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(10, 7), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return result


def sharded(*shape: int, spec: Any = (0, 1)) -> TwoLayers:
    """A model with one layer's weight cut and one's replicated."""
    model = TwoLayers().to(spmd.device())
    mesh = spmd.Mesh(range(WORKERS), shape or (1, WORKERS))
    spmd.mark_sharding(model.fc1.weight, mesh, spec)
    spmd.mark_sharding(model.fc2.weight, mesh, (None, None))
    return model


def on_cpu(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().cpu() for name, each in model.state_dict().items()}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    mine, its = on_cpu(one), on_cpu(other)
    assert mine.keys() == its.keys()
    assert all(mine[name].equal(its[name]) for name in mine)


def save(state: dict[str, Any], path: str, planner: Any) -> None:
    save_checkpoint(
        state,
        storage_writer=FileSystemWriter(path, sync_files=False),
        planner=planner,
        no_dist=True,
    )


def load(state: dict[str, Any], path: str, planner: Any) -> None:
    load_checkpoint(state, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)

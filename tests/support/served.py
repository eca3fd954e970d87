"""Models that workers serve in tests, and the same model in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import Replicate
from torch.nn import functional

from spmd.tensor_parallel import (
    ColwiseParallel,
    RowwiseParallel,
    ShardedModule,
    parallelize_module,
)
from tests.support.default_device import placed
from tests.support.workers import Worker

__all__ = [
    "HIDDEN",
    "MLP_PLAN",
    "PLAN",
    "WIDTH",
    "WORDS",
    "Mlp",
    "Net",
    "groups_named_served",
    "names",
    "served",
    "served_and_alone",
    "words",
]

WORDS, WIDTH, HIDDEN = 11, 8, 12


class Net(nn.Module):
    """Replicated, sharded and tied parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.w1 = nn.Linear(WIDTH, HIDDEN)
        self.w2 = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.count = nn.BatchNorm1d(1)

    def forward(self, words: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        hidden = self.embedding(words) * scale
        hidden = hidden + self.w2(functional.relu(self.w1(self.norm(hidden))))
        logits: Tensor = self.head(hidden)
        return logits


PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "w1": ColwiseParallel(),
    "w2": RowwiseParallel(),
    "head": ColwiseParallel(use_local_output=False),
}


class Mlp(nn.Sequential):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Dropout(dropout), nn.Linear(HIDDEN, width))


MLP_PLAN = {"0": ColwiseParallel(), "3": RowwiseParallel()}


def words(rows: int = 4, seed: int = 0) -> Tensor:
    return torch.randint(WORDS, (rows, 5), generator=torch.Generator().manual_seed(seed))


def names(worker: Worker) -> list[str]:
    """All workers but the driver."""
    return [f"worker{rank}" for rank in range(1, worker.world_size)]


def served(worker: Worker, factory: Any = Net, plan: Any = PLAN, **options: Any) -> ShardedModule:
    places = [placed(name) for name in names(worker)]
    return parallelize_module(factory, workers=places, parallelize_plan=plan, strict=True, **options)


def served_and_alone(worker: Worker, factory: Any = Net, plan: Any = PLAN) -> tuple[ShardedModule, nn.Module]:
    """A model, and one in this process with the same parameters."""
    torch.manual_seed(0)
    alone = factory()
    model = served(worker, factory, plan)
    model.load_state_dict(alone.state_dict())
    return model, alone


def groups_named_served() -> int:
    """How many process groups of models this worker is in."""
    return sum(name.startswith("served-") for name in distributed_c10d._world.pg_names.values())

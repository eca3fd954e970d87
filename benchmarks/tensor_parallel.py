"""A tensor-parallel MLP's step beside PyTorch's: ``python -m benchmarks.tensor_parallel``.

Our styles on the backend ``farcall``, PyTorch's on gloo and PyTorch's on ``farcall`` run in the same
processes, batch by batch in turn; what is printed is the median of the ratios of neighbouring batches.
"""

from __future__ import annotations

import os

# Before torch is imported: on few cores, its thread pools only get in the way of both sides.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel as pytorch
from torch.multiprocessing.spawn import spawn

import spmd  # noqa: F401  # registers the backend
from spmd import tensor_parallel as ours

__all__ = ["main"]

_BATCHES: Final = 15
_SECONDS: Final = 0.15
"""About what a batch of steps takes."""


@dataclass(frozen=True)
class _Case:
    """An MLP, ``features`` to ``hidden`` and back, and its input's rows."""

    features: int
    hidden: int
    rows: int


_CASES: Final = (_Case(512, 2048, 64), _Case(64, 256, 4))


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    torch.autograd.backward(model(x).sum())


def _seconds(model: nn.Module, x: torch.Tensor, count: int) -> float:
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(count):
        _step(model, x)
    return (time.perf_counter() - begun) / count


def _measure(rank: int, size: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("farcall", init_method=f"file://{store}", rank=rank, world_size=size)
    farcall = DeviceMesh.from_group(dist.group.WORLD, "cpu")  # type: ignore[arg-type]
    gloo = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    for case in _CASES:
        torch.manual_seed(0)
        alone = nn.Sequential(
            nn.Linear(case.features, case.hidden), nn.ReLU(), nn.Linear(case.hidden, case.features)
        )
        x = torch.randn(case.rows, case.features, requires_grad=True)
        models = []
        for side, mesh in ((ours, farcall), (pytorch, gloo), (pytorch, farcall)):
            model = copy.deepcopy(alone)
            plan = {"0": side.ColwiseParallel(), "2": side.RowwiseParallel()}
            side.parallelize_module(model, mesh, plan)
            models.append(model)
        for model in models:
            _seconds(model, x, 5)
        one = torch.tensor(_seconds(models[1], x, 5))
        dist.broadcast(one, 0)
        count = max(3, int(_SECONDS / one.item()))
        batches = [[_seconds(model, x, count) for model in models] for _ in range(_BATCHES)]
        if rank == 0:
            results.put((case, batches))
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor_parallel", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], metavar="N")
    arguments = parser.parse_args(argv)
    table = Table("MLP", "rows", "ranks", "ours, ms", "PyTorch's on gloo", "ratio", "on farcall", "ratio")
    context = multiprocessing.get_context("spawn")
    for size in arguments.processes:
        results = context.SimpleQueue()
        with tempfile.TemporaryDirectory(prefix="farcall-bench-") as folder:
            spawn(_measure, (size, str(Path(folder) / "store"), results), size)  # type: ignore[no-untyped-call]
        for _ in _CASES:
            case, batches = results.get()
            mine, *others = (statistics.median(each) * 1e3 for each in zip(*batches, strict=True))
            cells = [f"{case.features} to {case.hidden}", str(case.rows), str(size), f"{mine:.2f}"]
            for place, other in enumerate(others, start=1):
                ratio = statistics.median(batch[0] / batch[place] for batch in batches)
                cells += [f"{other:.2f}", f"{ratio:.2f} x"]
            table.add_row(*cells)
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

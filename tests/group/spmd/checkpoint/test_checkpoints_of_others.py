"""Checkpoints of programs with several processes, which use ``torch.distributed.checkpoint`` alone."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import spmd
from spmd.checkpoint import SPMDLoadPlanner, SPMDSavePlanner
from spmd.fsdp import FSDPv2
from tests.support.serving import first_of
from tests.support.workers import RunWorkers, Worker


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 5))


def table(seed: int) -> torch.Tensor:
    return torch.randn(9, 6, generator=torch.Generator().manual_seed(seed))


def state_of(module: nn.Module, table: torch.Tensor, step: int) -> dict[str, Any]:
    return {"model": module.state_dict(), "table": table, "step": step}


def assert_is(state: dict[str, Any], seed: int) -> None:
    """Whether everything has the values of a seed, wherever it lies."""
    wanted: dict[str, torch.Tensor] = {**model(seed).state_dict(), "table": table(seed)}
    for name, each in {**state["model"], "table": state["table"]}.items():
        whole = each.full_tensor() if isinstance(each, DTensor) else each.detach().cpu()
        assert whole.equal(wanted[name]), name
    assert state["step"] == seed


def as_a_group(worker: Worker, action: str, path: Path) -> None:
    """One rank of a program with FSDP and DTensor on gloo, which saves, or loads what the other has saved."""
    store = FileStore(str(path.parent / f"{action}-store"), worker.world_size)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.world_size)
    try:
        mesh = init_device_mesh("cpu", (worker.world_size,))
        seed = 1 if action == "save" else 0
        module = model(seed)
        for layer in module:
            fully_shard(layer, mesh=mesh)
        cut = distribute_tensor(table(seed), mesh, [Shard(1)])
        state = state_of(module, cut, seed)
        assert isinstance(state["model"]["0.weight"], DTensor)
        if action == "save":
            save(state, storage_writer=FileSystemWriter(path, sync_files=False))
        else:
            load(state, storage_reader=FileSystemReader(path))
            assert_is(state, 2)
    finally:
        dist.destroy_process_group()


def load_theirs_and_save_ours(worker: Worker, theirs: Path, ours: Path) -> None:
    """The same with workers of ours, which do not cut as theirs do."""
    spmd.use_spmd()
    mesh = spmd.Mesh(range(4), (2, 2), ("fsdp", "model"))

    def made(seed: int) -> dict[str, Any]:
        module = FSDPv2(model(seed), mesh=mesh).module
        cut = spmd.mark_sharding(table(seed).to(spmd.device()), mesh, (("model", "fsdp"), None))
        return state_of(module, cut, seed)

    state = made(0)
    before = state["model"]["0.weight"].sharding_spec
    load(state, storage_reader=FileSystemReader(theirs), planner=SPMDLoadPlanner(), no_dist=True)
    assert_is(state, 1)
    assert state["model"]["0.weight"].sharding_spec == before != ""
    writer = FileSystemWriter(ours, sync_files=False)
    save(made(2), storage_writer=writer, planner=SPMDSavePlanner(), no_dist=True)
    spmd.shutdown()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_checkpoints_of_several_processes_and_ours_are_exchanged(run_workers: RunWorkers, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder) / "theirs", Path(folder) / "ours"
        run_workers(partial(as_a_group, action="save", path=theirs), ranks)
        first_of(run_workers, load_theirs_and_save_ours, theirs, ours, world_size=5)
        run_workers(partial(as_a_group, action="load", path=ours), ranks)

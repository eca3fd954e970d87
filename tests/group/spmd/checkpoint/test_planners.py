"""Checkpoints of sharded tensors by planners, from and to programs without SPMD mode."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

import spmd
from spmd.checkpoint import CheckpointManager, SPMDLoadPlanner, SPMDSavePlanner, prime_optimizer
from spmd.checkpoint.planners import CpuShards, sharded_cpu_state_dict
from spmd.engine.driver.logical_tensor import alias_of
from tests.group.spmd.checkpoint.two_layers import TwoLayers, assert_same, load, save, sharded
from tests.group.spmd.driven import WORKERS, driven

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (((2, 2), (0, 1)), ((4, 1), (0, 1))),
        (((2, 2), ((1, 0), None)), ((2, 2), (None, (0, 1)))),
        (((2, 2), (0, None)), ((2, 2), (None, 1))),
        (((4,), (0, None)), ((4,), (None, 0))),
        (((4,), (0, None)), ((4,), (0, None))),
    ],
)
@driven
def test_a_checkpoint_loads_on_another_mesh(before: Any, after: Any) -> None:
    with tempfile.TemporaryDirectory() as path:
        model, other = sharded(*before[0], spec=before[1]), sharded(*after[0], spec=after[1])
        cut = other.fc1.weight.sharding_spec  # type: ignore[attr-defined]
        save(model.state_dict(), path, SPMDSavePlanner())
        load(other.state_dict(), path, SPMDLoadPlanner())
        assert_same(model, other)
        assert other.fc1.weight.sharding_spec == cut  # type: ignore[attr-defined]


@pytest.mark.parametrize("from_cpu", [False, True])
@driven
def test_a_program_without_workers_loads_it(from_cpu: bool) -> None:
    with tempfile.TemporaryDirectory() as path:
        model, alone = sharded(2, 2), TwoLayers()
        state = model.state_dict()
        save(sharded_cpu_state_dict(state) if from_cpu else state, path, SPMDSavePlanner())
        load(alone.state_dict(), path, None)
        assert_same(model, alone)


@driven
def test_what_such_a_program_saved_is_loaded() -> None:
    with tempfile.TemporaryDirectory() as path:
        model, alone = sharded(4, 1), TwoLayers()
        save(alone.state_dict(), path, None)
        load(model.state_dict(), path, SPMDLoadPlanner())
        assert_same(model, alone)


@driven
def test_only_what_is_cut_is_saved_by_shards() -> None:
    model = sharded()
    planner = SPMDSavePlanner()
    planner.set_up_planner(model.state_dict(), is_coordinator=True)
    assert set(planner.sharded_state_dict) == {"fc1.weight"}
    assert set(planner.unsharded_state_dict) == {"fc1.bias", "fc2.weight", "fc2.bias"}
    plan = planner.create_local_plan()
    shards = [item for item in plan.items if item.index.fqn == "fc1.weight"]
    assert len(shards) == WORKERS
    assert len(plan.items) == WORKERS + 3
    weight: Any = model.fc1.weight
    for item in shards:
        assert item.index.index is not None
        data: Any = planner.resolve_data(item)
        assert data.equal(weight.local_shards[item.index.index].unpadded_data)


@driven
def test_copies_of_a_shard_are_saved_once() -> None:
    planner = SPMDSavePlanner()
    planner.set_up_planner(sharded(2, 2, spec=(1, None)).state_dict(), is_coordinator=True)
    items = [item for item in planner.create_local_plan().items if item.index.fqn == "fc1.weight"]
    assert len(items) == 2


@driven
def test_a_snapshot_has_shards_only_of_what_is_cut() -> None:
    state = sharded_cpu_state_dict({"model": sharded().state_dict(), "step": 3})
    assert isinstance(state["model"]["fc1.weight"], CpuShards)
    assert state["model"]["fc2.weight"].device.type == "cpu"
    assert state["step"] == 3
    planner = SPMDSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    assert set(planner.sharded_state_dict) == {"model.fc1.weight"}


@driven
def test_a_snapshot_has_each_shard_once() -> None:
    mesh = spmd.Mesh(range(WORKERS), (2, WORKERS // 2))
    t = spmd.mark_sharding(torch.randn(8, 3).to(spmd.device()), mesh, (1, None))
    copied = sharded_cpu_state_dict({"t": t})["t"]
    assert sum(part.numel() for part in copied.parts.values()) == t.numel()


@driven
def test_shards_arrive_together_when_all_is_read() -> None:
    model = sharded()
    alone = TwoLayers()
    saver = SPMDSavePlanner()
    saver.set_up_planner(alone.state_dict(), is_coordinator=True)
    _, metadata = saver.create_global_plan([saver.create_local_plan()])
    planner = SPMDLoadPlanner()
    planner.set_up_planner(model.state_dict(), metadata, is_coordinator=True)
    items = [item for item in planner.create_local_plan().items if item.dest_index.fqn == "fc1.weight"]
    assert len(items) == WORKERS
    before = model.fc1.weight.detach().cpu()
    for item in items:
        assert model.fc1.weight.detach().cpu().equal(before)
        part = planner.resolve_tensor(item)
        part.fill_(7)
        planner.commit_tensor(item, part)
    assert model.fc1.weight.detach().cpu().equal(torch.full_like(before, 7))


@driven
def test_what_is_loaded_does_not_stay_with_the_driver() -> None:
    with tempfile.TemporaryDirectory() as path:
        model, alone = sharded(), TwoLayers()
        save(alone.state_dict(), path, None)
        load(model.state_dict(), path, SPMDLoadPlanner())
        values = [alias_of(each).value for each in model.parameters()]
        assert [value is None or value.data is None for value in values] == [True] * 4
        assert_same(model, alone)


@driven
def test_what_does_not_fit_is_refused() -> None:
    with tempfile.TemporaryDirectory() as path:
        save({"weight": torch.ones(8, 2)}, path, None)
        t = spmd.mark_sharding(torch.ones(4, 4).to(spmd.device()), spmd.get_1d_mesh(), (0, None))
        with pytest.raises(CheckpointException, match="Size mismatch"):
            load({"weight": t}, path, SPMDLoadPlanner())
        with pytest.raises(CheckpointException, match=r"Missing key.*: other"):
            load({"other": t}, path, SPMDLoadPlanner())
        save({"weight": "none"}, path, None)
        with pytest.raises(CheckpointException, match=r"Not a tensor.*: weight"):
            load({"weight": t}, path, SPMDLoadPlanner())


@driven
def test_a_tensor_without_elements_is_saved_and_loaded() -> None:
    with tempfile.TemporaryDirectory() as path:
        for spec in ((0, None), (None, 0)):
            t = spmd.mark_sharding(torch.ones(0, 8).to(spmd.device()), spmd.get_1d_mesh(), spec)
            save({"t": t}, path, SPMDSavePlanner())
            load({"t": t}, path, SPMDLoadPlanner())
            load({"t": torch.ones(0, 8)}, path, None)


@driven
def test_dropout_goes_on_where_the_devices_generator_was() -> None:
    def dropped() -> Tensor:
        return nn.functional.dropout(torch.ones(8, 8).to(spmd.device())).cpu()

    with tempfile.TemporaryDirectory() as path:
        manager = CheckpointManager(path, 1, chkpt_on_preemption=False)
        manager.save(0, {"rng": torch.spmd.get_rng_state()})  # type: ignore[attr-defined]
        before = dropped()
        state = {"rng": torch.spmd.get_rng_state()}  # type: ignore[attr-defined]
        manager.restore(0, state)
        torch.spmd.set_rng_state(state["rng"])  # type: ignore[attr-defined]
        assert dropped().equal(before)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@driven
def test_optimizers_go_on_where_they_were(kind: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(4, 10).to(spmd.device())).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def made() -> tuple[TwoLayers, Any]:
        model = sharded(2, 2)
        options: Any = {"momentum": 0.9} if kind == "SGD" else {}
        return model, getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)

    with tempfile.TemporaryDirectory() as path:
        model, optimizer = made()
        step(model, optimizer)
        manager = CheckpointManager(path, 1, chkpt_on_preemption=False)
        manager.save(0, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        other, new = made()
        prime_optimizer(new)
        state = {"model": other.state_dict(), "optimizer": new.state_dict()}
        manager.restore(0, state)
        other.load_state_dict(state["model"])
        new.load_state_dict(state["optimizer"])
        assert_same(model, other)
        step(model, optimizer)
        step(other, new)
        assert_same(model, other)

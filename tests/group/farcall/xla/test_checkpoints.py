"""Checkpoints under XLA's names; ``tests/group/spmd/checkpoint`` holds what they do."""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

import pytest
import torch

from tests.group.farcall.xla.names import SimpleLinear, mesh_of, theirs
from tests.group.spmd.driven import WORKERS, driven

pytestmark = pytest.mark.processes


@driven
def test_planners_take_snapshots_and_managers_restore_prepared_optimizers() -> None:
    x = theirs()
    lent: Any = importlib.import_module("torch_xla.experimental.distributed_checkpoint")
    helpers: Any = importlib.import_module("torch_xla.experimental.distributed_checkpoint._helpers")

    def made() -> tuple[Any, Any]:
        model: Any = SimpleLinear().to(x.xm.xla_device())
        x.xs.mark_sharding(model.fc1.weight, mesh_of(1, WORKERS), (0, 1))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made()
    torch.autograd.backward(model(torch.ones(10, 128).to("xla")).square().sum())
    optimizer.step()
    planner = lent.SPMDSavePlanner()
    planner.set_up_planner(helpers._sharded_cpu_state_dict(model.state_dict()), True)
    assert set(planner.unsharded_state_dict) == {"fc1.bias", "fc2.weight", "fc2.bias"}
    assert isinstance(planner.sharded_state_dict["fc1.weight"], helpers._CpuShards)

    new, steps = made()
    with tempfile.TemporaryDirectory() as path:
        manager = lent.CheckpointManager(path, 1, chkpt_on_preemption=False)
        assert manager.save(0, {"optim": optimizer.state_dict()}, force=True)
        found = {"optim": lent.prime_optimizer(steps).state_dict()}
        manager.restore(0, found)
    steps.load_state_dict(found["optim"])
    mine, its = optimizer.state[model.fc1.weight]["exp_avg"], steps.state[new.fc1.weight]["exp_avg"]
    assert its.sharding_spec == mine.sharding_spec != ""
    assert its.cpu().equal(mine.cpu())

"""Checkpoints under XLA's names; what they hold is in ``spmd/checkpoint``."""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.utils import _pytree as pytree

from tests.group.farcall.xla.names import SimpleLinear, mesh_of, said, theirs
from tests.group.spmd.driven import WORKERS, driven

pytestmark = pytest.mark.processes

CUT, WHOLE = {"fc1.weight"}, {"fc1.bias", "fc2.weight", "fc2.bias"}


def lent(name: str = "") -> Any:
    theirs()
    return importlib.import_module(f"torch_xla.experimental.distributed_checkpoint{name}")


def sharded(*shape: int) -> Any:
    """A model with one weight cut, and one marked as replicated."""
    x = theirs()
    model = SimpleLinear().to(x.xm.xla_device())
    x.xs.mark_sharding(model.fc1.weight, mesh_of(*shape), (0, 1))
    x.xs.mark_sharding(model.fc2.weight, mesh_of(*shape), (None, None))
    return model


@pytest.mark.parametrize(("before", "after"), [(None, (1, 4)), ((1, 4), None), ((2, 2), (4, 1))])
@driven
def test_state_moves_between_meshes_and_programs_without(before: Any, after: Any) -> None:
    one, other = (SimpleLinear() if each is None else sharded(*each) for each in (before, after))
    with tempfile.TemporaryDirectory() as path:
        writer = FileSystemWriter(path, sync_files=False, per_thread_copy_ahead=0)
        save_checkpoint(
            one.state_dict(), storage_writer=writer, planner=before and lent().SPMDSavePlanner(), no_dist=True
        )
        state = other.state_dict()
        planner = after and lent().SPMDLoadPlanner()
        load_checkpoint(state, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        assert mine.detach().cpu().equal(its.detach().cpu())


@pytest.mark.parametrize("on_cpu", [False, True])
@driven
def test_a_save_has_an_item_for_each_shard_and_one_for_what_is_whole(on_cpu: bool) -> None:
    model, helpers = sharded(1, WORKERS), lent("._helpers")
    state = model.state_dict()
    planner = lent().SPMDSavePlanner()
    planner.set_up_planner(helpers._sharded_cpu_state_dict(state) if on_cpu else state, True)
    assert (set(planner.sharded_state_dict), set(planner.unsharded_state_dict)) == (CUT, WHOLE)
    assert isinstance(planner.sharded_state_dict["fc1.weight"], helpers._CpuShards) == on_cpu
    items = planner.create_local_plan().items
    ours = [item for item in items if item.index.fqn == "fc1.weight"]
    assert (len(ours), len(items)) == (WORKERS, WORKERS + 3)
    shards = model.fc1.weight.local_shards
    for item in ours:
        assert planner.resolve_data(item).equal(shards[item.index.index].data)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@driven
def test_an_optimizer_is_restored_with_its_shardings(kind: str) -> None:
    x = theirs()

    def made() -> tuple[Any, Any]:
        model = sharded(1, WORKERS)
        return model, getattr(torch.optim, kind)(params=model.parameters())

    def told(model: Any, optimizer: Any) -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    def flat(state: Any) -> list[Any]:
        leaves = pytree.tree_leaves(state)
        return [(said(each), each.tolist()) if isinstance(each, torch.Tensor) else each for each in leaves]

    model, optimizer = made()
    torch.autograd.backward(model(torch.ones(10, 128).to("xla")).square().sum())
    optimizer.step()
    x.xm.mark_step()
    new, steps = made()
    with tempfile.TemporaryDirectory() as path:
        manager = lent().CheckpointManager(path, 1, chkpt_on_preemption=False)
        assert manager.save(0, told(model, optimizer), force=True)
        lent().prime_optimizer(steps)
        found = told(new, steps)
        manager.restore(0, found)
    assert flat(found) == flat(told(model, optimizer))
    new.load_state_dict(found["model"])
    steps.load_state_dict(found["optim"])
    assert flat(told(new, steps)) == flat(told(model, optimizer))


@driven
def test_a_manager_tracks_every_tenth_step_and_restores() -> None:
    x = theirs()
    model = sharded(1, WORKERS)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.autograd.backward(model(torch.ones(2, 128, device="xla")).sum())
    optimizer.step()
    x.xm.mark_step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    with tempfile.TemporaryDirectory() as path:
        manager = lent().CheckpointManager(path, save_interval=10, max_to_keep=2, chkpt_on_preemption=False)
        for step in range(1, 31):
            save = manager.save_async if step == 20 else manager.save
            assert save(step, state) == (step % 10 == 0)
        manager.join()
        assert manager.all_steps() == [20, 30]
        new = sharded(1, WORKERS)
        steps = lent().prime_optimizer(torch.optim.AdamW(new.parameters()))
        found = {"model": new.state_dict(), "optim": steps.state_dict()}
        manager.restore(20, found)
    one, other = state["optim"]["state"][0]["exp_avg"], found["optim"]["state"][0]["exp_avg"]
    assert one.sharding_spec == other.sharding_spec != ""
    assert one.cpu().equal(other.cpu())
    assert new.fc1.weight.detach().cpu().equal(model.fc1.weight.detach().cpu())

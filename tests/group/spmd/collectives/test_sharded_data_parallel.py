"""Models that are sharded over ranks train like in one process; their checkpoints fit other meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor

from tests.support.default_device import not_on_devices
from tests.support.process_groups import process_group
from tests.support.serving import in_standing
from tests.support.workers import Worker

dcp: Any = torch.distributed.checkpoint
RANKS = 4


def on_ranks(body: Callable[..., None]) -> Callable[..., None]:
    return in_standing(process_group, RANKS)(body)


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def adam(trained: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(trained.parameters(), lr=0.01, eps=1e-3)


def batches(steps: int = 3) -> Iterator[Tensor]:
    torch.manual_seed(1)
    for _ in range(steps):
        yield torch.randn(4 * RANKS, 6)


def train(trained: Any, optimizer: torch.optim.Optimizer, part: Callable[[Tensor], Tensor]) -> None:
    for whole in batches():
        optimizer.zero_grad()
        torch.autograd.backward(trained(part(whole)).square().mean())
        optimizer.step()


def alone() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What one process makes of the model and its optimizer with the whole batches."""
    trained = model()
    optimizer = adam(trained)
    train(trained, optimizer, lambda whole: whole)
    return dict(trained.state_dict()), whole_of(get_state_dict(trained, optimizer)[1])


def state_of(trained: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint has of both."""
    model_state, optimizer_state = get_state_dict(trained, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def whole_of(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: whole_of(each) for name, each in state.items()}
    return state.full_tensor() if isinstance(state, DTensor) else state


@not_on_devices("the ranks of these tests compute on the CPU")
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD])
@on_ranks
def test_the_wrapper_of_fsdp_trains_like_one_process(worker: Worker, strategy: ShardingStrategy) -> None:
    is_hybrid = strategy is ShardingStrategy.HYBRID_SHARD
    mesh = init_device_mesh("cpu", (2, 2) if is_hybrid else (4,))
    device = torch.device("cpu")
    wrapper: Any = FullyShardedDataParallel
    sharded = wrapper(model(), device_id=device, device_mesh=mesh, sharding_strategy=strategy)
    train(sharded, adam(sharded), lambda whole: whole.chunk(RANKS)[worker.rank])
    with wrapper.summon_full_params(sharded):
        torch.testing.assert_close(dict(sharded.module.state_dict()), alone()[0])


@not_on_devices("the ranks of these tests compute on the CPU")
@on_ranks
def test_a_checkpoint_of_a_replicated_and_sharded_model_is_loaded_on_other_meshes(worker: Worker) -> None:
    saved = model()
    fully_shard(saved, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = adam(saved)
    train(saved, optimizer, lambda whole: whole.chunk(RANKS)[worker.rank])
    expected, expected_optimizer = alone()
    torch.testing.assert_close(whole_of(saved.state_dict()), expected)
    path = str(worker.folder / "checkpoint")
    dcp.async_save(state_of(saved, optimizer), checkpoint_id=path).result()
    for shape in ((4,), None):  # sharded over all ranks, and whole
        loaded = model(seed=9)
        if shape is not None:
            fully_shard(loaded, mesh=init_device_mesh("cpu", shape))
        optimizer = adam(loaded)
        given = state_of(loaded, optimizer)
        dcp.load(given, checkpoint_id=path)
        model_state, optimizer_state = given["model"], given["optimizer"]
        set_state_dict(loaded, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        torch.testing.assert_close(whole_of(loaded.state_dict()), expected)
        found = whole_of(get_state_dict(loaded, optimizer)[1])
        assert found["state"], "the optimizer has no state"
        torch.testing.assert_close(found["state"], expected_optimizer["state"])

"""Programs for torchft run unmodified on elastic jobs, by ``farcall launch --lend-names``."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

from farcall import compat
from farcall.compat.torchft import DistributedDataParallel, Manager
from farcall.compat.torchft.local_sgd import DiLoCo, LocalSGD
from farcall.compat.torchft.manager import WorldSizeMode
from farcall.compat.torchft.process_group import ManagedProcessGroup
from rpc.errors import InvalidOptionError
from tests.group.spmd.elastic.test_elastic import init, model_of, weights
from tests.support.workers import RunWorkers, Worker

TRAIN = """
import os, signal
import torch
from torch import nn, optim
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

replica, starts = int(os.environ["REPLICA_GROUP_ID"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
data = torch.arange(64.0).view(32, 2)
sampler = DistributedSampler(
    data, replica, int(os.environ["NUM_REPLICA_GROUPS"]), group_rank=0, num_replicas=1, shuffle=False
)
torch.manual_seed(replica)
net = nn.Linear(2, 1)
inner = optim.AdamW(net.parameters())

def load(state):
    net.load_state_dict(state["model"])
    inner.load_state_dict(state["optim"])

manager = Manager(
    pg=ProcessGroupGloo(),
    min_replica_size=1,
    load_state_dict=load,
    state_dict=lambda: {"model": net.state_dict(), "optim": inner.state_dict()},
)
model = DistributedDataParallel(manager, net)
optimizer = Optimizer(manager, inner)
schedule = optim.lr_scheduler.StepLR(optimizer, 1000)
is_back = False
while not is_back:
    for index in sampler:
        optimizer.zero_grad()
        step = manager.current_step()
        loss = model(data[index]).sum()
        if replica == 1 and starts == "0" and manager.num_participants() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        is_back = manager.current_step() > step and manager.num_participants() == 2
        if is_back:
            break
total = sum(each.double().sum() for each in net.parameters())
print(manager.current_step(), total.item(), manager.batches_committed())
manager.shutdown()
"""


def run_program(worker: Worker) -> tuple[int, float, int]:
    """Run the program as replica 0 or 1; worker 2 takes the place of worker 1, which is killed."""
    if worker.rank == 2:
        worker.wait_for("the loss")
    init(worker)
    os.environ["REPLICA_GROUP_ID"], os.environ["NUM_REPLICA_GROUPS"] = str(min(worker.rank, 1)), "2"
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(worker.rank == 2))

    def die() -> None:
        worker.report("in the middle of a step")
        signal.pause()  # until it is killed

    compat.install()
    names: dict[str, Any] = {"__name__": "__main__", "die": die}
    exec(TRAIN.replace("os.kill(os.getpid(), signal.SIGKILL)", "die()"), names)
    manager = names["manager"]
    return manager.current_step(), names["total"].item(), manager.batches_committed()


def test_program_for_torchft_survives_a_kill(run_workers: RunWorkers) -> None:
    workers = run_workers.start(run_program, 3, time_limit=100)
    workers[1].wait_for("in the middle of a step")
    workers[1].kill()
    workers[2].tell("the loss")
    first, second = workers[0].result(), workers[2].result()
    assert first == second
    assert first[2] > first[0]  # one step had two participants


def train_with_rare_averages(worker: Worker) -> tuple[int, torch.Tensor, float]:
    init(worker)
    model = model_of(seed=worker.rank)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9)
    manager = Manager(None, model.load_state_dict, model.state_dict, min_replica_size=2)
    with pytest.raises(RuntimeError, match="no step is in progress"):
        manager.allreduce(torch.ones(1))
    x = torch.full((1, 4), 1.0 + worker.rank, dtype=torch.float64)

    def step() -> None:
        inner.zero_grad()
        model(x).sum().backward()
        inner.step()

    with LocalSGD(manager, model, inner, sync_every=2):
        for _ in range(4):
            step()
    assert manager.current_step() == 2
    manager.state_functions["default"][0](model.state_dict())
    rare = DiLoCo(manager, [model[0], model[2]], inner, outer, sync_every=2)  # type: ignore[index]
    with rare:
        for _ in range(4):
            step()
    manager.start_quorum()
    gradient = torch.tensor([1.0 + worker.rank])
    ManagedProcessGroup(manager).allreduce([gradient]).wait()
    manager.report_error(ValueError("not a number")) if worker.rank == 1 else None
    assert not manager.should_commit()
    steps = manager.current_step()
    manager.shutdown()
    manager.shutdown()
    averaged = [each.flatten() for fragment in rare._fragments for each in fragment._kept]
    assert torch.equal(torch.cat(averaged[2:]), weights(model)[-9:])  # the first has moved since
    return steps, torch.cat(averaged), gradient.item()


def test_rare_averages_are_equal_and_an_error_of_one_repeats_the_step_on_all(run_workers: RunWorkers) -> None:
    (steps, first, average), (_, second, _) = run_workers.start(
        train_with_rare_averages, 2, time_limit=100
    ).results()
    assert (steps, average) == (6, 3.0)
    assert torch.equal(first, second)


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match="replicas have one worker"):
        Manager(world_size=2)
    with pytest.raises(InvalidOptionError, match="only DYNAMIC is"):
        Manager(world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
    manager: Any = None
    with pytest.raises(TypeError, match="has no option buckets"):
        DistributedDataParallel(manager, nn.Linear(1, 1), buckets=3)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with pytest.raises(InvalidOptionError, match="fragment_sync_delay"):
        DiLoCo(manager, [nn.Linear(1, 1)], optimizer, optimizer, 2, fragment_sync_delay=1)
    with pytest.raises(InvalidOptionError, match="must be a multiple of 2"):
        DiLoCo(manager, [nn.Linear(1, 1)] * 2, optimizer, optimizer, 3)

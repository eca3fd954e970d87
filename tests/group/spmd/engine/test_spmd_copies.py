"""SPMD mode with copies: the loss of workers changes nothing but the time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import nn

import spmd
from rpc.errors import WorkerLostError
from spmd.engine.driver import start
from spmd.engine.errors import OperationError
from spmd.sharding.mode import use_spmd
from tests.support.orders import ask, dismiss, start_followers
from tests.support.workers import RunWorkers

STEPS = 7
EVERY = 3

training: list[Iterator[float]] = []
"""The training under way, on the driver."""


def train() -> Iterator[float]:
    """Losses of a model with sharded weights, replicated biases, and dropout; some programs differ."""
    torch.manual_seed(0)
    device, count = spmd.device(), spmd.global_device_count()
    mesh = spmd.Mesh(np.arange(count), (count,), ("x",))
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 6)).to(device)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            spmd.mark_sharding(parameter, mesh, ("x", None))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in itertools.count():
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item() if step % 3 else loss.detach().mul(2).item()


def begin(workers: Sequence[str], copies: int = 1) -> None:
    use_spmd(workers, copies=copies, every=EVERY)
    training[:] = [train()]


def losses(count: int) -> list[float]:
    return list(itertools.islice(training[0], count))


def end() -> dict[str, int]:
    counts = dict(start._current().session.counts)
    spmd.shutdown()
    return counts


@pytest.mark.parametrize("before", [EVERY, 2 * EVERY - 1])
def test_a_lost_worker_changes_no_value(run_workers: RunWorkers, before: int) -> None:
    """Right after a save, and right before the next one."""
    workers = start_followers(run_workers, 5, dynamic=True)
    lost = 1 + before % 3
    ask(workers[0], begin, ["worker1", "worker2", "worker3"])
    found = ask(workers[0], losses, before)
    workers[lost].kill()
    found += ask(workers[0], losses, STEPS - before)
    counts = ask(workers[0], end)
    assert counts["losses"] == 1
    assert counts["repeated"] <= EVERY + 1
    left = [worker.name for place, worker in enumerate(workers) if place not in (0, lost)]
    ask(workers[0], begin, left, 0)
    assert found == ask(workers[0], losses, STEPS)
    dismiss(workers)


def fail() -> str:
    with pytest.raises(OperationError) as raised:
        torch.multinomial(torch.tensor([[1.0, float("nan")]]).to(spmd.device()), 1).cpu()
    return str(raised.value)


def test_after_a_failed_operation_and_two_losses_one_after_the_other_training_goes_on(
    run_workers: RunWorkers,
) -> None:
    workers = start_followers(run_workers, 5, dynamic=True)
    ask(workers[0], begin, ["worker1", "worker2"])
    found = ask(workers[0], losses, 2)
    said = ask(workers[0], fail)
    for lost in (1, 3):  # the second one is in the first one's place
        workers[lost].kill()
        found += ask(workers[0], losses, 2)
    counts = ask(workers[0], end)
    assert "multinomial" in said
    assert counts["losses"] == 2
    ask(workers[0], begin, ["worker2", "worker4"], 0)
    assert found[:2] == ask(workers[0], losses, 2)
    ask(workers[0], fail)
    assert found[2:] == ask(workers[0], losses, 4)
    dismiss(workers)


def lose() -> str:
    with pytest.raises(WorkerLostError) as raised:
        losses(1)
    spmd.shutdown()
    return str(raised.value)


@pytest.mark.parametrize(
    ("places", "lost"),
    [
        (["worker1", "worker2", "worker3"], [1, 2]),
        (["worker1"], [1]),
        (["worker1", "worker2", "worker3", "worker4"], [2]),
    ],
    ids=["with its neighbour", "alone", "without a spare"],
)
def test_what_cannot_be_survived_ends_the_mode_with_the_name_of_the_worker(
    run_workers: RunWorkers, places: list[str], lost: list[int]
) -> None:
    workers = start_followers(run_workers, 5, dynamic=True)
    ask(workers[0], begin, places)
    ask(workers[0], losses, 2)
    for place in lost:
        workers[place].kill()
    said = ask(workers[0], lose)
    named = re.match(r"worker 'worker(\d)' is gone: ", said)
    assert named
    assert int(named[1]) in lost
    dismiss(workers)


@pytest.mark.parametrize(("copies", "every"), [(2, 10), (1, 0)])
def test_other_numbers_are_refused(copies: int, every: int) -> None:
    with pytest.raises(ValueError, match="expected copies of 0 or 1, and every of 1 or more"):
        use_spmd(2, copies=copies, every=every)

"""Training on batches of ever new lengths: what the driver and its workers hold stays the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

import rpc
import spmd
from spmd.engine.api import constrain
from spmd.engine.driver import start
from spmd.engine.errors import OperationError
from spmd.engine.program.program import Layout, MeshKey
from tests.support.living import living, resident_bytes
from tests.support.workers import RunWorkers, Worker

ROWS = Layout(MeshKey((0, 1), (2,)), (Shard(0),))
MIB = 1 << 20


class Training:
    """A model of one weight, and its optimizer; batches are cut over the two workers."""

    def __init__(self) -> None:
        self.weight = torch.ones(4, 1).to(spmd.device()).requires_grad_()
        self.optimizer = torch.optim.SGD([self.weight], lr=0.01)

    def step(self, length: int) -> Tensor:
        rows = (torch.arange(4.0 * length).reshape(length, 4) / (4 * length)).to(spmd.device())
        constrain(rows, ROWS)
        loss = (rows @ self.weight).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def expected(self, lengths: list[int]) -> list[float]:
        """The losses, computed here."""
        weight = torch.ones(4, 1).requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=0.01)
        losses = []
        for length in lengths:
            rows = torch.arange(4.0 * length).reshape(length, 4) / (4 * length)
            loss = (rows @ weight).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def everywhere(function: Any) -> list[Any]:
    """What a function returns here, and on each worker."""
    return [function(), *(rpc.rpc_sync(name, function) for name in start.worker_names())]


def fail_on_a_worker() -> None:
    """An operation that fails while later steps are on their way already."""
    table = torch.ones(3).to(spmd.device())
    wrong = torch.tensor([7]).to(spmd.device())
    found = table[wrong] * 2
    with pytest.raises(OperationError):
        found.cpu()


def train_on_many_lengths(worker: Worker, first: int, count: int, programs: int) -> list[Any]:
    with worker.group():
        if worker.rank:
            return []
        spmd.use_spmd(max_programs=programs)
        training = Training()
        seen: list[tuple[list[Counter[str]], list[int]]] = []
        lengths = list(range(1, first + count + 1))
        waiting: list[Tensor] = []
        losses: list[float] = []
        for length in lengths:
            waiting.append(training.step(length))
            if length % 50 == 0:
                losses += [each.item() for each in waiting]
                waiting.clear()
                fail_on_a_worker()
            if length in (first, first + count):
                spmd.sync()
                seen.append((everywhere(living), everywhere(resident_bytes)))
        losses += [each.item() for each in waiting]
        assert losses == pytest.approx(training.expected(lengths), rel=1e-3)
        spmd.shutdown()
        return seen


def check_flat(seen: list[Any]) -> None:
    """A full cache holds between half of its limit and all of it; all lengths would be three times that."""
    (before, _), (after, _) = seen
    for place, (earlier, later) in enumerate(zip(before, after, strict=True)):
        assert all(later[name] <= 2 * earlier[name] + 50 for name in earlier), (place, earlier, later)
    assert all(each["LinkedProgram"] for each in before[1:])


def test_counts_stay_the_same_on_the_driver_and_on_workers(run_workers: RunWorkers) -> None:
    seen, *_ = run_workers(train_on_many_lengths, 3, args=(60, 120, 4), time_limit=240)
    check_flat(seen)
    assert all(each["LinkedProgram"] <= 4 for each in seen[1][0])


@pytest.mark.nightly
def test_ten_thousand_lengths_take_no_more_memory(run_workers: RunWorkers) -> None:
    seen, *_ = run_workers(train_on_many_lengths, 3, args=(2000, 8000, 32), time_limit=7200)
    check_flat(seen)
    (_, before), (_, after) = seen
    assert all(later - earlier < 32 * MIB for earlier, later in zip(before, after, strict=True)), seen

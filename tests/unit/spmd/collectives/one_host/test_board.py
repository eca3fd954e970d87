"""No slot of the shared memory is overwritten before it is read, in whatever order ranks do their steps."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from rpc.bulk.shared_memory import memory as shared_memory
from rpc.runtime.blocking import INFINITE
from spmd.collectives import memory
from spmd.collectives.one_host import board as board_module
from spmd.collectives.one_host import local as local_module
from spmd.collectives.one_host.board import SLOTS, Board, board_bytes
from spmd.collectives.one_host.local import LocalCollectives, header_bytes
from spmd.collectives.reductions import reduction_of
from spmd.collectives.signature import signature
from tests.support.effort import EFFORT

CALL = signature("a test")
SUM = reduction_of(ReduceOp.SUM)
PARTS_BYTES = 256
"""Of a slot here, so that small tensors take many parts."""

Body = Callable[[LocalCollectives, int], None]


class _Abandoned(BaseException):
    """Another rank has failed."""


class Steps:
    """Lets one thread at a time do one step, in a random order in which some ranks stay far behind."""

    def __init__(self, size: int, seed: int) -> None:
        self._chance = random.Random(seed)
        self._favourite = 0
        self._size = size
        self._go = [threading.Semaphore(0) for _ in range(size)]
        self._stopped = threading.Semaphore(0)
        self._ready: list[Callable[[], bool] | None] = [bool] * size
        self._rank = threading.local()
        self._gone = False
        self.errors: list[BaseException] = []

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Called by a rank: let others go on, and come back when it is ready and its turn."""
        rank = self._rank.value
        self._ready[rank] = ready
        self._stopped.release()
        self._go[rank].acquire()
        if self._gone:
            raise _Abandoned

    def run(self, body: Callable[[int], None]) -> None:
        """Runs ``body(rank)`` for each."""

        def be(rank: int) -> None:
            self._rank.value = rank
            try:
                self.pause()
                body(rank)
                self._ready[rank] = None
            except _Abandoned:
                pass
            except Exception as error:
                self._ready[rank] = None
                self.errors.append(error)
            finally:
                self._stopped.release()

        threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        for _ in threads:
            self._stopped.acquire()
        while any(ready is not None for ready in self._ready):
            can = [rank for rank, ready in enumerate(self._ready) if ready is not None and ready()]
            if not can:
                break
            if self._favourite not in can or self._chance.random() < 0.03:
                self._favourite = self._chance.choice(can)
            self._go[self._favourite].release()
            self._stopped.acquire()
        for rank in range(self._size):  # the others of one that failed wait for ever
            self._gone = True
            self._go[rank].release()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors.pop()
        assert not any(self._ready), "ranks wait for each other"


class SteppedBoard(Board):
    steps: Steps

    def publish(self) -> int:
        self.steps.pause()
        number = super().publish()
        self.steps.pause()
        return number

    def wait_for(self, number: int, deadline: float = INFINITE) -> None:
        self.steps.pause(lambda: all(self._has_come(word, number) for _, word in self._others))


def run(monkeypatch: pytest.MonkeyPatch, size: int, seed: int, slots: int, body: Body) -> None:
    """Runs ``body`` on all ranks, in an order that the seed gives, with so many slots."""
    steps = Steps(size, seed)

    def move(target: int, source: int, begin: int, end: int, move: Any = memory.move) -> None:
        steps.pause()
        move(target, source, begin, end)

    with monkeypatch.context() as patch:
        patch.setattr(board_module, "SLOTS", slots)
        patch.setattr(board_module, "SLOT_BYTES", PARTS_BYTES)
        patch.setattr(local_module, "SLOT_BYTES", PARTS_BYTES)
        patch.setattr(local_module, "_SMALL_BYTES", PARTS_BYTES)
        patch.setattr(local_module, "move", move)
        header = header_bytes(size)
        descriptor = shared_memory.create(board_bytes(size, header))
        mapping = shared_memory.Mapping(descriptor, board_bytes(size, header))
        os.close(descriptor)

        def be(rank: int) -> None:
            board = SteppedBoard(mapping, range(size), rank, header, lambda _: None)
            board.steps = steps
            body(LocalCollectives(board), rank)

        steps.run(be)


def numbers(rank: int, step: int, count: int) -> torch.Tensor:
    return torch.arange(count) * 31 + 1000 * rank + 100_000 * step


def total(rank_numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(rank_numbers)).sum(0)


def reduce_often(mine: LocalCollectives, rank: int, size: int) -> None:
    """Large and small, so that the end of one and the beginning of the next are tried too."""
    for step, count in enumerate([200, 3, 150, 64, 5, 5, 300]):
        tensor = numbers(rank, step, count)
        mine.all_reduce(CALL, INFINITE, tensor, SUM, step % size if step == 2 else None)
        expected = total([numbers(each, step, count) for each in range(size)])
        if step != 2:
            assert torch.equal(tensor, expected)


def exchange_often(mine: LocalCollectives, rank: int, size: int) -> None:
    for step, count in enumerate([100, 3, 40, 7]):
        outputs = [torch.empty(count, dtype=torch.int64) for _ in range(size)]
        if step % 2:
            mine.all_to_all(CALL, INFINITE, outputs, [numbers(rank, each, count) for each in range(size)])
            expected = [numbers(each, rank, count) for each in range(size)]
        else:
            mine.all_gather(CALL, INFINITE, outputs, numbers(rank, step, count))
            expected = [numbers(each, step, count) for each in range(size)]
        assert all(torch.equal(*each) for each in zip(outputs, expected, strict=True))
        tensor = numbers(rank, step, count)
        mine.broadcast(CALL, INFINITE, tensor, step % size)
        assert torch.equal(tensor, numbers(step % size, step, count))
        mine.reduce_scatter(CALL, INFINITE, tensor, [numbers(rank, each, count) for each in range(size)], SUM)
        assert torch.equal(tensor, total([numbers(each, rank, count) for each in range(size)]))


def mix(mine: LocalCollectives, rank: int, size: int) -> None:
    exchange_often(mine, rank, size)
    reduce_often(mine, rank, size)
    mine.barrier(CALL, INFINITE)
    exchange_often(mine, rank, size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("body", [reduce_often, exchange_often, mix])
def test_nothing_is_overwritten_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch, size: int, body: Callable[..., None]
) -> None:
    for seed in range(8 * EFFORT if EFFORT > 1 else 2):
        run(monkeypatch, size, seed, SLOTS, lambda mine, rank: body(mine, rank, size))


def test_an_exchange_needs_three_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(mine: LocalCollectives, rank: int) -> None:
        exchange_often(mine, rank, 3)

    for seed in range(5):
        run(monkeypatch, 3, seed, 3, body)
    with pytest.raises(AssertionError):  # which shows that these orders find what goes wrong
        run(monkeypatch, 3, 0, 2, body)
    gc.collect()  # errors keep their frames, and these the memory

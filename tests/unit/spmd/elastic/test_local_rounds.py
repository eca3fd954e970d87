"""Outer reductions, and the attempts that they are made of, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from spmd.elastic.agreement import Member, View
from spmd.elastic.attempt import Attempt
from spmd.elastic.errors import JobMismatchError
from spmd.elastic.local_sgd import DiLoCo, LocalSGD, Round
from spmd.elastic.sampling import Sampler
from spmd.elastic.state import State

STEP = 4
NAMES = {1: "first", 2: "second", 3: "third"}
DONE = SimpleNamespace(wait=lambda: None)


class Exchange:
    """What the members of one view exchange; each member has a thread."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def gathered(self, rank: int, value: torch.Tensor) -> list[torch.Tensor]:
        self._values[rank] = value.clone()
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


class Ranks:
    """The process group of one member."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self._rank = exchange, rank
        self.group = SimpleNamespace(members=SimpleNamespace(failed=False), abort=lambda reason: None)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        tensors[0].copy_(torch.stack(self._exchange.gathered(self._rank, tensors[0])).sum(0))
        return DONE

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None
    ) -> Any:
        for each, value in zip(outputs[0], self._exchange.gathered(self._rank, inputs[0]), strict=True):
            each.copy_(value)
        return DONE

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        tensors[0].copy_(self._exchange.gathered(self._rank, tensors[0])[options.rootRank])
        return DONE


def view_of(number: int, members: Sequence[int]) -> View:
    return View(number, (number, members[0]), tuple(members), frozenset(), 0)


def attempt_at(view: View, me: int, exchange: Exchange, batch: int, state: State) -> Attempt:
    """An attempt of one member, which is in the view already."""
    views: Any = SimpleNamespace(
        me=me,
        name=NAMES[me],
        core=Member(me, STEP, view=view, ballot=view.ballot, frozen=False),
        replica=SimpleNamespace(failed=False),
        outcome=None,
        error=None,
    )
    views.changed, views.closed = threading.Condition(), False
    views.wants_to_grow, views.suspect = (lambda: False), (lambda: None)
    views.awaited = list
    views.fail = lambda error, tell: None
    ranks = Ranks(exchange, view.members.index(me))
    groups: Any = SimpleNamespace(votes=ranks, sums=ranks, failed=False)
    return Attempt(views, view, groups, STEP, Sampler(48, batch), state, [])


def round_of(
    me: int, begun: View, now: View, exchange: Exchange, kind: Callable[[Any, nn.Module], LocalSGD]
) -> tuple[Round, nn.Module]:
    """A round that a member has begun in one view, and whose first attempt is in another one."""
    model = nn.BatchNorm1d(1)
    state = State({"model": model})
    job: Any = SimpleNamespace(
        train_locally=lambda *_: None,
        has=lambda optimizer: True,
        members=[NAMES[each] for each in now.members],
    )
    made = Round(kind(job, model), job, attempt_at(begun, me, exchange, 12, state), None)
    made._attempt = attempt_at(now, me, exchange, 12, state)
    return made, model


def local(job: Any, model: nn.Module) -> LocalSGD:
    return LocalSGD(job, model, torch.optim.SGD(model.parameters(), 0.1), 2)


def together(members: Sequence[int], run: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(members)) as pool:
        return [each.result(60) for each in [pool.submit(run, each) for each in members]]


@pytest.mark.parametrize(
    ("begun", "learned", "buffer"),
    [
        ({2: (1, [1, 2, 3]), 3: (2, [2, 3])}, 2.0, 2.0),  # samples 4 to 7, and 6 to 11
        ({2: (2, [2, 3]), 3: (1, [2, 3, 1])}, 3.0, 3.0),  # 0 to 5, and 4 to 7
        ({2: (2, [2, 3]), 3: (1, [1, 2, 3])}, (6 * 2.0 + 4 * 3.0) / 10, 2.0),  # 0 to 5, and 8 to 11
        ({2: (1, [1, 2, 3]), 3: (1, [1, 2, 3])}, 2.5, 2.0),
    ],
)
def test_sample_is_averaged_once_if_members_have_begun_a_round_in_different_views(
    begun: dict[int, tuple[int, list[int]]], learned: float, buffer: float
) -> None:
    now = view_of(2, [2, 3])
    exchange = Exchange(2)

    def run(me: int) -> tuple[list[float], list[float]]:
        each, model = round_of(me, view_of(*begun[me]), now, exchange, local)
        with each:
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data.fill_(me)
        assert each.committed
        return [each.item() for each in model.parameters()], [each.item() for each in model.buffers()]

    first, second = together([2, 3], run)
    assert first == second
    assert first[0] == pytest.approx([learned, learned])
    assert first[1] == [buffer] * 3


def test_members_that_train_locally_in_different_ways_are_refused() -> None:
    view, exchange = view_of(1, [1, 2]), Exchange(2)

    def other(job: Any, model: nn.Module) -> LocalSGD:
        inner, outer = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
        return DiLoCo(job, model, inner, outer, 3)

    def run(me: int) -> str:
        each, _ = round_of(me, view, view, exchange, local if me == 1 else other)
        with pytest.raises(JobMismatchError) as caught, each:
            pass
        return str(caught.value)

    first, second = together([1, 2], run)
    one, two = "LocalSGD with sync_every=2", "DiLoCo with sync_every=3"
    assert first.startswith(f"worker 'second' trains by {two}, and this worker by {one}")
    assert second.startswith(f"worker 'first' trains by {one}, and this worker by {two}")


def test_buffers_are_those_of_the_first_member_that_has_samples() -> None:
    view, exchange = view_of(1, [1, 2, 3]), Exchange(3)

    def run(me: int) -> tuple[int, float]:
        model = nn.BatchNorm1d(1)
        attempt = attempt_at(view, me, exchange, 2, State({"model": model}))
        with attempt:
            model.running_mean.fill_(me)  # type: ignore[union-attr]
        assert attempt.committed
        return len(attempt.indices), model.running_mean.item()  # type: ignore[union-attr]

    assert together([1, 2, 3], run) == [(0, 2.0), (1, 2.0), (1, 2.0)]

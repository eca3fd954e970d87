"""Locks of parameters: which optimizers may work on which parameters at the same time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dist_autograd.parameter_locks import LockTable, ParameterLocks
from rpc.errors import AutogradError

SECONDS = 10.0


def parameters(count: int) -> list[Tensor]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(count)]


def in_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def hold(locks: ParameterLocks, entered: threading.Event, leave: threading.Event) -> Callable[[], None]:
    def run() -> None:
        with locks.held():
            entered.set()
            assert leave.wait(SECONDS)

    return run


@pytest.mark.parametrize(("shared", "both_may"), [(True, False), (False, True)])
def test_only_those_who_share_a_parameter_exclude_each_other(shared: bool, both_may: bool) -> None:
    a, b, c, d = parameters(4)
    table = LockTable()
    one, other = table.of([a, b]), table.of([c, b] if shared else [c, d])
    entered, leave, second = threading.Event(), threading.Event(), threading.Event()
    first = in_thread(hold(one, entered, leave))
    assert entered.wait(SECONDS)
    another = in_thread(hold(other, second, leave))
    if both_may:
        assert second.wait(SECONDS)
    else:
        assert not second.wait(0.05)
    leave.set()
    first.join(SECONDS)
    another.join(SECONDS)
    assert second.is_set()


def test_overlapping_sets_named_in_any_order_do_not_deadlock() -> None:
    pool, table = parameters(6), LockTable()
    sets = [table.of([each]) for each in pool]
    for start in range(6):
        ring = pool[start:] + pool[:start]
        sets += [table.of(ring[:3]), table.of(ring[:3][::-1])]
    done = []

    def work(locks: ParameterLocks) -> None:
        for _ in range(200):
            with locks.held():
                pass
        done.append(locks)

    threads = [in_thread(lambda locks=locks: work(locks)) for locks in sets]  # type: ignore[misc]
    for thread in threads:
        thread.join(SECONDS)
    assert len(done) == len(sets)


def test_who_holds_locks_is_refused_what_would_wait_for_them() -> None:
    (a, b, c), table = parameters(3), LockTable()
    outer, overlapping, apart = table.of([a, b]), table.of([b, c]), table.of([c])
    with outer.held():
        with pytest.raises(AutogradError, match="this was called by a hook"), overlapping.held():
            pass
        with pytest.raises(AutogradError, match="step was called by a hook"):
            table.check_none_held("step")
        with apart.held():
            pass
        with pytest.raises(AutogradError):
            table.check_none_held("step")
    table.check_none_held("step")
    with overlapping.held():
        pass


def test_locks_are_forgotten_with_their_parameters() -> None:
    table, held = LockTable(), parameters(3)
    locks = table.of(held)
    assert len(table) == 3
    del held, locks
    gc.collect()
    assert not len(table)

"""What PyTorch sets up when it is first used, used first by two threads at a time.

PyTorch does that under a lock of its own. A thread that collects garbage meanwhile may let go of the
interpreter, and a second one wait for that lock with the interpreter in hand: then the process stands still.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import GradientEdge

from tests.support.serving import in_group
from tests.support.workers import RunWorkers, Worker

SECONDS = 10.0
WORKERS = 10
"""In each, garbage is collected at another moment."""


def prepare_backward() -> Callable[[], object]:
    leaf = torch.ones(1, requires_grad=True)
    node: Any = leaf.clone().grad_fn
    run: Any = torch.autograd.Variable._execution_engine.run_backward
    arguments = ((GradientEdge(node, 0),), (torch.ones(1),), False, False, (leaf,), True, False)
    return lambda: run(*arguments)


def prepare_placement() -> Callable[[], object]:
    place = torch.empty(0).set_
    arguments = (torch.zeros(2).untyped_storage(), 0, (2,), (1,))
    return lambda: place(*arguments)


def use_while_collecting(worker: Worker, prepare: Callable[[], Callable[[], object]]) -> None:
    collecting, used = threading.Event(), threading.Event()
    first, second = prepare(), prepare()

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            collecting.set()
            used.wait(SECONDS)

    def use_too() -> None:
        collecting.wait(SECONDS)
        second()
        used.set()

    thread = threading.Thread(target=use_too)
    thread.start()
    gc.collect()
    gc.disable()
    Garbage()
    gc.set_threshold(gc.get_count()[0] + worker.rank)
    gc.enable()
    first()
    gc.disable()
    collecting.set()
    thread.join()
    assert used.is_set()


@pytest.mark.parametrize("prepare", [prepare_backward, prepare_placement])
def test_two_threads_may_be_the_first(
    run_workers: RunWorkers, prepare: Callable[[], Callable[[], object]]
) -> None:
    run_workers(functools.partial(in_group(use_while_collecting), args=(prepare,)), WORKERS)

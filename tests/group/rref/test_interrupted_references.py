"""Ctrl-C while references are made, sent and used: nothing is left of them, at the user or the owner."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any, Final

import torch

import rpc
from rpc.agent import calls
from rpc.agent.agent import Agent
from rpc.runtime.current import current_agent
from rpc.runtime.interrupts import interruptible, protected
from rpc.serialization import pickle_codec, pickler
from rref import carrier, reference
from tests.support.interrupting import press
from tests.support.serving import in_worker0
from tests.support.stepping import Step
from tests.support.streams import until

INTERRUPTIONS = 100


def remembered() -> dict[str, int]:
    """How many references, objects and calls this worker knows of."""
    agent: Agent = current_agent()
    counts = {**agent.extensions["rref"].counts(), "calls": agent.calls.table.unanswered()}
    return {kind: count for kind, count in counts.items() if count}


def use_there(rref: rpc.RRef[torch.Tensor]) -> float:
    return float(rref.to_here().sum())


def use_references() -> None:
    mine = rpc.RRef(torch.ones(3))
    theirs = rpc.remote("worker1", torch.ones, args=(2,))
    assert rpc.rpc_sync("worker1", use_there, args=(mine,)) == 3
    assert float(theirs.rpc_sync().sum()) == 2
    assert rpc.rpc_sync("worker1", use_there, args=(theirs,)) == float(theirs.to_here().sum())


def press_again_and_again(ready: threading.Semaphore) -> None:
    for number in range(INTERRUPTIONS):
        ready.acquire()
        for _ in range(number * 997 % 5000):  # so that it comes at different moments
            pass
        os.kill(os.getpid(), signal.SIGINT)


@in_worker0()
def test_interruptions_leave_nothing() -> None:
    ready, caught = threading.Semaphore(0), 0
    use_references()
    presser = threading.Thread(target=press_again_and_again, args=(ready,), daemon=True)
    presser.start()
    while caught < INTERRUPTIONS:
        try:
            ready.release()
            while True:
                use_references()
        except KeyboardInterrupt:
            caught += 1
    presser.join()
    until(lambda: not remembered())
    until(lambda: not rpc.rpc_sync("worker1", remembered))


# ---- at every instruction


FILES: Final = {module.__file__ for module in (calls, carrier, pickle_codec, pickler, reference)}
STRIDE: Final = 5
"""What is left undone by an interruption is so for longer than this many instructions."""


class Bin:
    def throw(self, _: Any) -> None:
        pass


@interruptible
def pass_on(mine: rpc.RRef[int], theirs: rpc.RRef[Bin]) -> None:
    rpc.rpc_sync("worker1", id, args=(mine,))
    rpc.rpc_async("worker1", id, args=(mine,)).wait()
    rpc.remote("worker1", id, args=(mine,))
    theirs.rpc_sync().throw(mine)
    theirs.rpc_async().throw(mine).wait()
    theirs.remote().throw(mine)


@interruptible
def press_here() -> None:
    press()


@protected  # for Ctrl-C may come while the one before is being dealt with
def interrupt_at(number: int, mine: rpc.RRef[int], theirs: rpc.RRef[Bin]) -> bool:
    """Whether so many instructions are run when references are passed on."""
    with contextlib.suppress(KeyboardInterrupt), Step(number, press, files=FILES) as step:
        pass_on(mine, theirs)
    with contextlib.suppress(KeyboardInterrupt):
        press_here()  # if the other has not been raised yet, it comes with this
    return step.taken


@protected
def interrupt_everywhere(mine: rpc.RRef[int], theirs: rpc.RRef[Bin]) -> int:
    number = 1
    while interrupt_at(number, mine, theirs):
        number += STRIDE
    return number


@in_worker0()
def test_a_message_that_is_interrupted_is_sent_or_its_references_are_taken_back() -> None:
    mine, theirs = rpc.RRef(1), rpc.remote("worker1", Bin)
    assert interrupt_everywhere(mine, theirs) > 1000
    until(lambda: remembered() == {"owned": 1, "local": 1, "users": 1, "objects": 1})
    until(lambda: rpc.rpc_sync("worker1", remembered) == {"owned": 1, "shared": 1, "forks": 1, "objects": 1})

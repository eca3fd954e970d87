"""Ctrl-C while references are made, sent and used: nothing is left of them, at the user or the owner."""

from __future__ import annotations

import os
import signal
import threading

import torch

import rpc
from rpc.agent.agent import Agent
from rpc.runtime.current import current_agent
from tests.support.serving import in_worker0
from tests.support.streams import until

INTERRUPTIONS = 100


def remembered() -> dict[str, int]:
    """How many references, objects and calls this worker knows of."""
    agent: Agent = current_agent()
    counts = {**agent.extensions["rref"].counts(), "calls": agent.calls.unanswered()}
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

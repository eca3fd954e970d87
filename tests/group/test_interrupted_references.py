"""Ctrl-C while references are made and sent: what has gone out is the callee's, and nothing else is left."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rpc
from rpc.agent.agent import Agent
from rpc.agent.call_table import CallTable
from rpc.group.peer import Peer
from rpc.runtime.current import current_agent
from rpc.runtime.mailbox import Mailbox
from rref.creation import Creation
from rref.references import References
from tests.support.serving import first_of
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

kept: list[rpc.RRef[torch.Tensor]] = []
arrived = threading.Event()


def remembered() -> int:
    """How many references, objects and calls this worker knows of."""
    agent: Agent = current_agent()
    references: References = agent.extensions["rref"]
    counts: dict[str, int] = references._do(references._protocol.counts)
    return sum(counts[each] for each in ("users", "local", "owned")) + agent.calls.unanswered()


def keep(reference: rpc.RRef[torch.Tensor]) -> None:
    kept.append(reference)
    arrived.set()


def use_kept() -> float:
    arrived.wait()  # nobody waits for the call that brings it
    return float(kept[0].to_here().sum())


def interrupted_after_sending(_: Worker) -> float:
    send_small = Peer.send_small

    def send_and_interrupt(self: Peer, *args: Any, **kwargs: Any) -> None:
        send_small(self, *args, **kwargs)
        raise KeyboardInterrupt

    rpc.rpc_sync("worker1", int)
    reference = rpc.RRef(torch.ones(5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Peer, "send_small", send_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            rpc.rpc_async("worker1", keep, args=(reference,))
    del reference
    gc.collect()
    return float(rpc.rpc_sync("worker1", use_kept))


def test_a_reference_whose_sender_was_interrupted_can_be_used(run_workers: RunWorkers) -> None:
    assert first_of(run_workers, interrupted_after_sending) == 5


# ---- what a step of the protocol asks for


def interrupt_once(original: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
    """Does what ``original`` does, but the first time in the main thread there is Ctrl-C before or after."""
    pressed = False

    def call(*args: Any) -> Any:
        nonlocal pressed
        interrupts = not pressed and threading.current_thread() is threading.main_thread()
        pressed = pressed or interrupts
        if not (interrupts and before):
            original(*args)
        if interrupts:
            raise KeyboardInterrupt

    return call


def interrupt_release(_: Worker, where: Any, attribute: str, *, before: bool) -> None:
    references: References = current_agent().extensions["rref"]
    rref = rpc.remote("worker1", int)
    rref.to_here()
    until(rref.confirmed_by_owner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, attribute, interrupt_once(getattr(where, attribute), before=before))
        with pytest.raises(KeyboardInterrupt):
            references._do_alone(references._protocol.release, rref._ref)
    until(lambda: not rpc.rpc_sync("worker1", remembered))


@pytest.mark.parametrize(
    ("where", "attribute", "before"),
    [(gc, "enable", False), (Mailbox, "soon", True)],
    ids=["when the step is over", "when something is to be sent"],
)
def test_a_reference_is_given_back_though_who_is_about_to_say_so_is_interrupted(
    run_workers: RunWorkers, where: Any, attribute: str, before: bool
) -> None:
    first_of(run_workers, functools.partial(interrupt_release, before=before), where, attribute)


# ---- creations

MOMENTS: dict[str, tuple[Any, str]] = {
    "before it is in the table of calls": (CallTable, "open"),
    "before it is sent": (Creation, "begin"),
    "right after it is sent": (CallTable, "watch"),
    "before the user has it": (rpc.RRef, "_bind"),
}


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def interrupt_creation(_: Worker, where: Any, attribute: str) -> None:
    for owner in ("worker0", "worker1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, attribute, interrupt)
            with pytest.raises(KeyboardInterrupt):
                rpc.remote(owner, int)
    until(lambda: not remembered())
    until(lambda: not rpc.rpc_sync("worker1", remembered))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_creation_that_was_interrupted_leaves_nothing(run_workers: RunWorkers, moment: str) -> None:
    first_of(run_workers, interrupt_creation, *MOMENTS[moment])


def interrupt_before_sending(_: Worker) -> list[int]:
    """How many calls are under way each time that the one who is interrupted tells of an end."""
    agent: Agent = current_agent()
    under_way: list[int] = []

    def something_ended() -> None:
        if threading.current_thread() is threading.main_thread():
            under_way.append(agent.calls.unanswered())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent, "something_ended", something_ended)
        patch.setattr(Creation, "begin", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rpc.remote("worker1", int)
    return under_way


def test_who_waits_to_leave_is_told_of_a_creation_interrupted_before_it_is_sent(
    run_workers: RunWorkers,
) -> None:
    assert first_of(run_workers, interrupt_before_sending) == [0]

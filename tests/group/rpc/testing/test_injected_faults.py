"""``rpc.testing.faults``: what is asked for happens to the messages that it is for, and to no others."""

from __future__ import annotations

import time

import pytest
import torch

import rpc
from rpc.errors import RpcError
from rpc.runtime.current import current_agent
from rpc.testing.faults import Fault, Faults, InjectedFaultError
from rpc.wire.frames import Kind
from tests.support.serving import in_standing_group

_calls: list[None] = []


def count() -> int:
    _calls.append(None)
    return len(_calls)


@in_standing_group()
def test_a_call_that_fails_says_so_and_never_comes() -> None:
    with Faults() as faults:
        rule = faults.fail("call", what="count", times=1)
        with pytest.raises(InjectedFaultError, match="to worker 'worker1' failed"):
            rpc.rpc_sync("worker1", count)
        assert rpc.rpc_sync("worker1", count) == 1
    assert rule.struck == 1


@in_standing_group()
def test_what_is_late_is_sent_when_its_time_has_come() -> None:
    with Faults() as faults:
        faults.delay("call", seconds=0.2, times=1)
        begun = time.monotonic()
        assert rpc.rpc_sync("worker1", count) == 1
        assert time.monotonic() - begun >= 0.2


@in_standing_group()
def test_large_tensors_meet_faults_too() -> None:
    large = torch.ones(1 << 20)
    with Faults() as faults:
        rule = faults.fail("call", times=1)
        with pytest.raises(InjectedFaultError):
            rpc.rpc_sync("worker1", torch.sum, (large,))
        assert rpc.rpc_sync("worker1", torch.sum, (large,)) == 1 << 20
    assert rule.struck == 1


@in_standing_group()
def test_an_agent_has_one_set_of_faults() -> None:
    with Faults(), pytest.raises(RpcError, match="has faults already"):
        Faults().install(current_agent())
    with Faults():
        pass  # and another when those are gone


def test_rules_choose_by_kind_receiver_and_what_is_asked_for() -> None:
    faults = Faults()
    faults.fail("call", to="a", what="f", times=1)
    faults.delay(seconds=2.0, to="b")

    def decide(kind: int, to: str, asked: str = "") -> Fault | None:
        return faults.decide(kind, to, lambda: asked)

    assert decide(Kind.CALL, "a", "g") is None
    assert decide(Kind.REPLY, "a", "f") is None
    assert decide(Kind.CALL, "a", "f") == Fault("fail")
    assert decide(Kind.CALL, "a", "f") is None  # no more times
    assert decide(Kind.REPLY, "b") == Fault("delay", 2.0)


def test_a_kind_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="no kind of message 'cal': there are hello, "):
        Faults().drop("cal")

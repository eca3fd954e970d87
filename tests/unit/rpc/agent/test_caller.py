"""A call that cannot be sent: who waits to leave is told that it is no longer under way."""

from __future__ import annotations

from typing import Any

import pytest

from rpc.agent.agent import Agent
from rpc.agent.call_table import CallTable
from rpc.agent.caller import Caller
from rpc.agent.pending_call import PendingCall
from rpc.errors import RpcTimeoutError, WorkerLostError
from rpc.serialization.payload import Payload
from rpc.transport import QueueFull
from rpc.wire.frames import Kind
from tests.support.answering import fail
from tests.support.clockwork import Clockwork
from tests.support.members import peer


class Unsending:
    """An agent's part: nothing can be sent, and it notes how many calls are under way when it is told."""

    def __init__(self, error: BaseException) -> None:
        self.calls = CallTable(self, Clockwork(), fail)  # type: ignore[arg-type]
        self.send = lambda *_, **__: fail(error)
        self.under_way: list[int] = []

    def something_ended(self) -> None:
        self.under_way.append(self.calls.unanswered())

    def request(self, caller: Caller, peer: Any) -> PendingCall:
        return caller.request(peer, Kind.CALL, Payload({}, [b""]), 1.0, "what")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(QueueFull(), RpcTimeoutError), (WorkerLostError("gone", "callee", "it died"), WorkerLostError)],
    ids=["too much is queued", "the callee is gone"],
)
def test_a_call_that_ends_unsent_tells_that_it_has_ended(error: Exception, outcome: type[Exception]) -> None:
    agent, callee = Unsending(error), peer()
    callee.gone("it died")
    call = agent.request(Caller(agent), callee)  # type: ignore[arg-type]
    assert isinstance(call.outcome, outcome)
    assert agent.under_way == [0]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_call_whose_sending_raises_tells_that_it_has_ended(error: type[BaseException]) -> None:
    agent = Unsending(error())
    with pytest.raises(error):
        agent.request(Caller(agent), peer())  # type: ignore[arg-type]
    assert set(agent.under_way) == {0}


def test_a_call_interrupted_before_it_was_sent_tells_that_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = Unsending(KeyboardInterrupt())
    caller = Caller(agent)  # type: ignore[arg-type]
    monkeypatch.setattr(caller, "transmit", agent.send)
    with pytest.raises(KeyboardInterrupt):
        agent.request(caller, peer())
    assert agent.under_way == [0]


def test_a_call_given_up_when_its_callee_is_gone_tells_that_it_has_ended() -> None:
    agent, callee = Unsending(KeyboardInterrupt()), peer()
    call = agent.calls.open(callee, "what", 1.0)
    callee.gone("it died")
    assert isinstance(Agent.expire(agent, call), RpcTimeoutError)  # type: ignore[arg-type]
    assert agent.under_way == [0]

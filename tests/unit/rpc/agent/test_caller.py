"""A call that cannot be sent ends, and who waits to leave is told; what is reserved is let go."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from rpc.agent.calls import Caller, PendingCall, name_of
from rpc.agent.dispatcher import Sender
from rpc.agent.tape import Tracing
from rpc.errors import RpcTimeoutError, WorkerLostError
from rpc.group.peer import Peer
from rpc.runtime.events import Events
from rpc.runtime.interrupts import interruptible
from rpc.serialization.payload import Payload
from rpc.serialization.serializer import Serializer
from rpc.transport.base import QueueFull
from rpc.wire.frames import Kind
from tests.support.answering import table_of
from tests.support.members import peer
from tests.support.streams import Recording


class Unsending:
    """An agent that can send nothing; notes how many calls are under way when it is told."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.under_way: list[int] = []
        unused: Any = None
        self.calls = table_of(unused, ended=self.something_ended)
        sender: Any = SimpleNamespace(send=self.send)
        self.sender = sender
        self.caller = Caller(60.0, self.calls, unused, sender, Serializer(), Tracing(), Events())

    def send(self, *_: object, **__: object) -> None:
        raise self.error

    def something_ended(self) -> None:
        self.under_way.append(self.calls.unanswered())

    def request(self, to: Peer) -> PendingCall:
        return self.caller.request(to, Kind.CALL, Payload({}, [b""]), 1.0, "what")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(QueueFull(), RpcTimeoutError), (WorkerLostError("gone", "callee", "it died"), WorkerLostError)],
    ids=["too much is queued", "the callee is gone"],
)
def test_a_call_that_ends_unsent_tells_that_it_has_ended(error: Exception, outcome: type[Exception]) -> None:
    agent, callee = Unsending(error), peer()
    callee.gone("it died")
    assert isinstance(agent.request(callee).outcome, outcome)
    assert agent.under_way == [0]
    with pytest.raises(outcome):
        agent.caller.inquire(callee, Kind.CALL, Payload({}, [b""]), 1.0, "what")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_call_whose_sending_raises_tells_that_it_has_ended(error: type[BaseException]) -> None:
    agent = Unsending(error())
    with pytest.raises(error):
        agent.request(peer())
    with pytest.raises(error):
        agent.caller.inquire(peer(), Kind.CALL, Payload({}, [b""]), 1.0, "what")
    assert agent.under_way == [0, 0]


@interruptible
def ring(*_: object, **__: object) -> None:
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("error", [QueueFull(), WorkerLostError("gone", "another", "it died")], ids=repr)
def test_what_a_signal_handler_raises_while_a_call_is_sent_is_not_the_outcome_of_that_call(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler may have made a call itself, to another worker."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise error

    agent = Unsending(AssertionError())
    monkeypatch.setattr(agent.sender, "send", ring)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(type(error)) as raised:
            agent.request(peer())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert raised.value is error
    assert agent.under_way == [0]


@pytest.mark.usefixtures("deferred")
def test_ctrl_c_while_a_call_is_sent_gives_it_up_if_another_thread_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is deferred until the message is sent: the call must not stay under way, with nobody to end it."""
    agent = Unsending(AssertionError())
    monkeypatch.setattr(agent.sender, "send", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        agent.caller.inquire(peer(), Kind.CALL, Payload({}, [b""]), 1.0, "what")
    assert not list(agent.calls.waiting())
    assert agent.under_way == [1]  # the callee may still answer


def test_a_call_to_a_worker_about_to_be_lost_is_left_to_who_says_why() -> None:
    agent = Unsending(WorkerLostError("closed", "callee", "closed"))
    call = agent.request(peer())
    assert not call.done()
    assert list(agent.calls.waiting()) == [call]


def test_a_call_of_a_function_of_ours_that_timed_out_advises_nothing_that_the_program_did_not_call() -> None:
    unused: Any = None
    call = PendingCall(table_of(unused), 1, peer(), name_of, 0.02)
    assert str(call.timeout_error()).endswith(
        " has not answered. If it may take longer, rpc.set_rpc_timeout(0) sets no limit for all calls."
    )


class Copies:
    """Copies of a message's device tensors, which are made when the test says so."""

    is_wanted: Callable[[], bool] | None = None

    def owns(self, memory: memoryview) -> bool:
        return False

    def begin(self) -> bool:
        return True

    def when_done(self, callback: Callable[[BaseException | None], object]) -> None:
        self.made = callback


@pytest.mark.parametrize("expires", [False, True], ids=["a call under way", "a call that has expired"])
def test_a_message_whose_tensors_are_copied_is_sent_if_its_call_is_under_way_then(
    expires: bool,
) -> None:
    unused: Any = None
    activity: Any = SimpleNamespace(postponed=SimpleNamespace(begin=int, end=int), ended=int)
    callee, connection, copies, table = peer(), Recording(), Copies(), table_of(unused)
    callee.established(connection)
    sender = Sender(Serializer(), Events(), activity, unused, unused, unused)
    caller = Caller(60.0, table, unused, sender, Serializer(), Tracing(), Events())
    payload = Payload({}, [b""], staging=copies)
    if expires:
        with pytest.raises(RpcTimeoutError):
            caller.inquire(callee, Kind.CALL, payload, 1e-3, "what")
    else:
        caller.request(callee, Kind.CALL, payload, 60.0, "what")
    copies.made(None)
    assert (len(connection.sent), table.unanswered()) == ((0, 0) if expires else (1, 1))

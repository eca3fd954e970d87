"""An exception, or a call of a signal handler, before any instruction of a thread that reads directly."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rpc.runtime.loop import LoopThread
from rpc.transport.inline_read import reading
from rpc.transport.inline_read.reading import DirectReading
from rpc.wire.frames import Kind
from tests.support import stepping
from tests.support.direct_end import Call, End, frame
from tests.support.streams import Sockets, until

pytestmark = pytest.mark.skipif(not reading.AVAILABLE, reason="only the loop reads here")


_MODULES = (
    "rpc.transport.inline_read.reading",
    "rpc.transport.inline_read.role",
    "rpc.transport.inline_read.turn",
)
Step = functools.partial(stepping.Step, files=[sys.modules[module].__file__ for module in _MODULES])


class Interruption(BaseException):
    """What a signal handler raises."""


def interrupt() -> None:
    raise Interruption


@pytest.fixture
def one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread looks once before it sleeps, so that it takes the same steps each time."""
    monkeypatch.setattr(reading, "_MOMENT_SECONDS", 0.0)
    monkeypatch.setattr(reading, "_MAY_LOOK", 1)


BRIEFLY = 0.005
"""Seconds to read for what another may have read, or what comes only later."""

MINE = (Kind.REPLY, 7)
ELSEWHERE = (Kind.IN_SEGMENT, 7)

ARRIVALS = {
    "its reply": [MINE],
    "its reply elsewhere": [ELSEWHERE],
    "a request": [(Kind.CALL, 1)],
    "its reply and a request": [MINE, (Kind.CALL, 1)],
}


@pytest.mark.usefixtures("one_look")
@pytest.mark.parametrize("what", ARRIVALS)
@pytest.mark.parametrize("claimed", [True, False])
def test_an_exception_before_any_instruction_loses_nothing(
    loop: LoopThread, sockets: Sockets, what: str, claimed: bool
) -> None:
    end = End(loop, sockets())
    sent = b"".join(frame(*each) for each in ARRIVALS[what])
    step = Step(0, interrupt)
    while step.taken or not step.number:
        end.forgive()
        call = Call(7)
        step = Step(step.number + 1, interrupt)
        over = threading.Event()

        def talk(over: threading.Event = over) -> None:
            until(lambda: end.direct.is_read_by_thread() or over.is_set())
            end.there.sendall(sent)

        with ThreadPoolExecutor(1) as other:
            turn = end.direct.claim() if claimed else None
            assert turn is not None or not claimed
            talking = other.submit(talk)
            with contextlib.suppress(Interruption), step:
                end.direct.read_reply(call, end.deadline(), turn)
            if claimed:
                end.direct.leave()  # as who claims does in any case
            over.set()
            talking.result()
        end.there.sendall(frame(Kind.CALL, 1000))
        until(lambda: (Kind.CALL, 1000) in end.since_the_last_look())
        until(lambda: end.direct.role.holder() is None)
        taken_in = end.arrived()
        for each in [*ARRIVALS[what], (Kind.CALL, 1000)]:
            if each == ELSEWHERE:
                assert taken_in.count(each) + call.has_taken() == 1, step.number
                assert call.has_taken() == (call.outcome is not None), step.number
            elif each != MINE:
                assert taken_in.count(each) == 1, step.number
            elif call.outcome is None:
                assert each in taken_in, step.number
        assert taken_in[-1] == (Kind.CALL, 1000)
    assert step.number > 100
    loop.call(end.connection.close, "end of the test")


def test_an_exception_in_the_middle_of_a_claim_leaves_the_reading_to_the_loop(
    loop: LoopThread, sockets: Sockets
) -> None:
    end = End(loop, sockets())
    step = Step(0, interrupt)
    while step.taken or not step.number:
        step = Step(step.number + 1, interrupt)
        with contextlib.suppress(Interruption), step:
            end.direct.claim()
        end.direct.leave()  # as who claims does in any case
        end.loop_reads()
        assert end.arrived() == [(Kind.CALL, 999)]
    assert step.number > 30
    loop.call(end.connection.close, "end of the test")


def test_a_second_exception_while_the_role_is_given_up_is_made_good_by_the_next_wait(
    loop: LoopThread, sockets: Sockets
) -> None:
    end = End(loop, sockets())
    exceptions = [Interruption() for _ in range(4)]

    class Interrupted(DirectReading):
        __slots__ = ()

        def _end(self, turn: Any) -> None:
            if exceptions:
                raise exceptions.pop()
            super()._end(turn)

    end.direct.__class__ = Interrupted
    with pytest.raises(Interruption):
        end.direct.read_reply(Call(7), time.monotonic() + 0.01)
    exceptions.clear()
    assert end.direct.role.own_turn() is not None
    end.there.sendall(frame(Kind.CALL, 1))
    end.direct.read_reply(Call(8), time.monotonic() + 0.01)
    assert end.next_of_loop(1)[0] == (Kind.CALL, 1)
    end.loop_reads()
    loop.call(end.connection.close, "end of the test")


@pytest.mark.usefixtures("one_look")
@pytest.mark.parametrize("mine", [MINE, ELSEWHERE])
def test_a_signal_handler_may_wait_for_a_reply_of_its_own_before_any_instruction(
    loop: LoopThread, sockets: Sockets, mine: tuple[int, int]
) -> None:
    end = End(loop, sockets())
    step = Step(0, interrupt)
    while step.taken or not step.number:
        end.forgive()
        outer, inner = Call(7), Call(8)

        def call_from_handler(inner: Call = inner) -> None:
            sys.settrace(None)
            end.there.sendall(frame(Kind.REPLY, 8))
            end.direct.read_reply(inner, time.monotonic() + BRIEFLY)
            # What this thread does not read, the loop must: the wait that was interrupted goes on later.
            until(lambda: inner.outcome or (Kind.REPLY, 8) in end.since_the_last_look())

        step = Step(step.number + 1, call_from_handler)
        turn = end.direct.claim()
        assert turn is not None
        end.there.sendall(frame(*mine))
        with step:
            end.direct.read_reply(outer, time.monotonic() + BRIEFLY, turn)
        end.there.sendall(frame(Kind.CALL, 1000))
        until(lambda: (Kind.CALL, 1000) in end.since_the_last_look())
        until(lambda: end.direct.role.holder() is None)
        taken_in = end.arrived()
        assert outer.outcome is not None or mine in taken_in, step.number
        if mine == ELSEWHERE:
            assert taken_in.count(mine) + outer.has_taken() == 1, step.number
        assert taken_in.count((Kind.CALL, 1000)) == 1, step.number
    assert step.number > 100
    loop.call(end.connection.close, "end of the test")


@pytest.mark.usefixtures("one_look")
def test_a_signal_handler_may_wait_for_a_reply_in_the_middle_of_a_claim(
    loop: LoopThread, sockets: Sockets
) -> None:
    end = End(loop, sockets())
    step = Step(0, interrupt)
    while step.taken or not step.number:
        end.forgive()
        inner = Call(8)

        def call_from_handler(inner: Call = inner) -> None:
            sys.settrace(None)
            end.there.sendall(frame(Kind.REPLY, 8))
            end.direct.read_reply(inner, time.monotonic() + BRIEFLY)
            until(lambda: inner.outcome or (Kind.REPLY, 8) in end.since_the_last_look())

        step = Step(step.number + 1, call_from_handler)
        with step:
            turn = end.direct.claim()
        end.direct.read_reply(Call(7), time.monotonic(), turn)
        end.loop_reads()
        assert end.arrived()[-1] == (Kind.CALL, 999), step.number
    assert step.number > 30
    loop.call(end.connection.close, "end of the test")

"""How two begin to share segments and end it, whatever else each of them does meanwhile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest

from rpc.bulk.shared_memory import exchange
from tests.unit.rpc.bulk.shared_memory.meanwhile import meanwhile
from tests.unit.rpc.bulk.shared_memory.sides import Sides

DATA = bytes(range(256)) * 512
OTHER = DATA[::-1]


@contextlib.contextmanager
def opened() -> Iterator[Sides]:
    sides = Sides()
    yield sides
    sides.close()


@pytest.fixture
def sides() -> Iterator[Sides]:
    with opened() as made:
        yield made


def send_until_shared(sides: Sides) -> None:
    """Send until a message goes through a segment; everything before went elsewhere."""
    for _ in range(4):
        through_segment = sides.here.send(DATA)
        sides.turn()
        if through_segment:
            return
    raise AssertionError("messages go through no segment")


def at_each_line(
    function: Callable[[Sides], object],
    happens: Callable[[Sides], object],
    prepare: Callable[[Sides], object] = bool,
) -> Iterator[Sides]:
    """Two sides for each line of the exchange that a function runs, after something happened before it."""
    line = 0
    ran = True
    while ran:
        line += 1
        with opened() as sides:
            prepare(sides)
            ran = meanwhile(
                line, functools.partial(happens, sides), functools.partial(function, sides), exchange
            )
            if ran:
                yield sides
    assert line > 5


def test_the_first_large_message_asks_and_a_later_one_goes_through_a_segment(sides: Sides) -> None:
    assert not sides.here.send(DATA)
    send_until_shared(sides)
    assert sides.there.received == [DATA]
    assert sides.there.asked() == 1


def test_two_threads_that_send_first_before_the_loop_turns_ask_once() -> None:
    for sides in at_each_line(lambda sides: sides.here.send(DATA), lambda sides: sides.here.send(OTHER)):
        send_until_shared(sides)
        assert sides.there.asked() == 1
        assert not sides.there.lost


def test_a_thread_that_sends_first_undoes_nothing_that_another_has_begun() -> None:
    for sides in at_each_line(lambda sides: sides.here.send(DATA), send_until_shared):
        sides.turn()
        send_until_shared(sides)
        assert sides.there.asked() == 1
        assert not sides.there.lost


def test_a_peer_that_is_gone_by_the_time_is_not_asked() -> None:
    def lose(sides: Sides) -> None:
        sides.here.exchange.peer_gone(sides.there, "it died")  # type: ignore[arg-type]

    for sides in at_each_line(lambda sides: sides.here.send(DATA), lose):
        sides.turn()
        assert not sides.here.send(DATA)
        assert not sides.there.heard


def test_a_worker_that_has_left_asks_nobody() -> None:
    for sides in at_each_line(lambda sides: sides.here.send(DATA), lambda sides: sides.here.exchange.close()):
        sides.turn()
        assert not sides.here.send(DATA)
        assert not sides.there.heard


def test_what_is_made_while_the_rest_is_given_back_is_given_back_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prepare(sides: Sides) -> None:
        with monkeypatch.context() as rests_long:
            rests_long.setattr(exchange, "IDLE_SECONDS", 60.0)
            send_until_shared(sides)

    monkeypatch.setattr(exchange, "IDLE_SECONDS", 0.0)
    for sides in at_each_line(
        lambda sides: sides.here.exchange._trim(), lambda sides: sides.here.send(OTHER * 2), prepare
    ):
        sides.turn()
        assert sides.here.exchange._pool.size == 0
        assert not sides.there.lost

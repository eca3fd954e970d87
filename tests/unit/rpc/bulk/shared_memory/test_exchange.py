"""How two begin to share memory and end it, and what is said on the way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.rpc.bulk.shared_memory.sides import Sides

DATA = bytes(range(256)) * 512


@contextlib.contextmanager
def opened(**options: Any) -> Iterator[Sides]:
    sides = Sides(**options)
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


def test_the_first_large_message_asks_and_a_later_one_goes_through_a_segment(sides: Sides) -> None:
    assert not sides.here.send(DATA)
    send_until_shared(sides)
    assert sides.there.received == [DATA]
    assert (sides.there.heard, sides.here.heard) == (["ask"], ["come", "proof"])


def test_of_several_large_messages_one_asks(sides: Sides) -> None:
    for _ in range(3):
        assert not sides.here.send(DATA)
    send_until_shared(sides)
    assert sides.there.heard == ["ask"]


def test_small_messages_ask_nobody(sides: Sides) -> None:
    assert not sides.here.send(DATA[:1000])
    sides.turn()
    assert not sides.there.heard


def test_a_worker_on_another_host_is_not_asked(sides: Sides) -> None:
    sides.there.near = False
    assert not sides.here.send(DATA)
    sides.turn()
    assert not sides.there.heard


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"bound": 0}, "turned off there"), ({"takes": False}, "safe mode")],
    ids=["off", "safe"],
)
def test_who_takes_no_shared_memory_refuses_and_the_log_says_why(
    options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(**options) as sides:
        for _ in range(3):
            assert not sides.here.send(DATA)
            sides.turn()
        assert (sides.there.heard, sides.here.heard) == (["ask"], ["refuse"])
        assert reason in caplog.text


def test_a_peer_that_is_gone_by_then_is_not_asked(sides: Sides) -> None:
    assert not sides.here.send(DATA)
    sides.there.lost = "it died"
    sides.here.shared.peer_gone(sides.there, sides.there.lost)
    sides.turn()
    assert not sides.here.send(DATA)
    sides.turn()
    assert not sides.there.heard


def test_a_worker_that_has_left_asks_nobody(sides: Sides) -> None:
    sides.here.shared.close()
    assert not sides.here.send(DATA)
    sides.turn()
    assert not sides.there.heard


@pytest.mark.parametrize("turns", range(12))
def test_a_peer_may_be_gone_at_any_stage(turns: int, sides: Sides) -> None:
    for _ in range(turns):
        sides.here.send(DATA)
        sides.loop.call_soon(sides.loop.stop)
        sides.loop.run_forever()
    sides.there.shared.peer_gone(sides.here, "it died")
    sides.here.shared.peer_gone(sides.there, "it died")
    assert not sides.here.send(DATA)
    assert sides.here.shared.usage() == (0, 0)


NONSENSE: list[list[dict[str, Any]]] = [
    [{"hello": 1}],
    [{"come": ["name", bytes(16), 1, 1]}],
    [{"come": "here"}],
    [{"proof": bytes(32)}],
    [{"refuse": "no"}],
    [{"drop": [1]}],
    [{"ask": True}, {"ask": True}],
]


@pytest.mark.parametrize("said", NONSENSE, ids=str)
def test_what_makes_no_sense_is_an_error(sides: Sides, said: list[dict[str, Any]]) -> None:
    errors: list[Any] = []
    sides.loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    for header in said:
        sides.here.say(**header)
    sides.turn()
    assert [type(error).__name__ for error in errors] == ["ProtocolError"] * len(said)

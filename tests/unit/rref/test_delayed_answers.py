"""Answers to creations: each is sent once, alone or with the answer to the creator's first fetch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rpc.errors import ProtocolError
from rpc.serialization.payload import Payload
from rpc.wire.frames import Frame, Kind, decode_one
from rref.delayed_answers import DelayedAnswers
from rref.requests import FETCHED, fetched_with_creation

NOTHING, VALUE = b"nothing", b"value"


class Worker:
    """A worker that is sent answers."""

    codec = SimpleNamespace(nothing=(NOTHING,), id=0)

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def send_small(self, frame: bytes, wait: float, **_: bool) -> None:
        self.frames.append(decode_one(bytearray(frame)))

    def flush(self) -> None:
        pass

    def got(self) -> list[tuple[int, int, bytes]]:
        return [(each.kind, each.call_id, bytes(each.buffers[0])) for each in self.frames]


@pytest.fixture
def delayed() -> DelayedAnswers:
    mailbox: Any = SimpleNamespace(gathered=lambda *_: None)
    hooks: Any = SimpleNamespace(gone=[])
    return DelayedAnswers(mailbox, hooks)


def answer_fetch(delayed: DelayedAnswers, to: Any, call_id: int, creator: Any) -> None:
    """Answer the fetch of an object that a call with id 7 of a worker has created."""
    delayed.answer_fetch(to, call_id, Payload({}, [VALUE]), (creator, 7), 0)


def test_the_creators_first_fetch_is_answered_together_with_the_creation(delayed: DelayedAnswers) -> None:
    creator: Any = Worker()
    delayed.add(creator, 7)
    answer_fetch(delayed, creator, 8, creator)
    delayed.send(creator)
    answer_fetch(delayed, creator, 9, creator)
    both, alone = creator.frames
    creation_id, answer = fetched_with_creation(both)
    assert (both.kind, creation_id, answer.kind, answer.call_id) == (FETCHED, 7, Kind.REPLY, 8)
    assert bytes(answer.buffers[0]) == VALUE
    assert (alone.kind, alone.call_id, bytes(alone.buffers[0])) == (Kind.REPLY, 9, VALUE)


def test_a_creation_is_answered_alone_if_another_worker_fetches(delayed: DelayedAnswers) -> None:
    creator: Any = Worker()
    other: Any = Worker()
    delayed.add(creator, 7)
    delayed.add(other, 7)  # a creation of that worker, of another object
    answer_fetch(delayed, other, 8, creator)
    delayed.send(creator)
    assert other.got() == [(Kind.REPLY, 8, VALUE)]
    assert creator.got() == [(Kind.REPLY, 7, NOTHING)]


def test_an_answer_that_names_no_calls_is_refused() -> None:
    with pytest.raises(ProtocolError, match="does not say which object or call"):
        fetched_with_creation(Frame(FETCHED, 0, {}, [b"short"]))

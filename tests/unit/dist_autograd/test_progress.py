"""The states of a backward on one worker."""

from __future__ import annotations

import itertools
import threading

import pytest

from dist_autograd.progress import Action, Event, Progress, State

SECONDS = 10.0


def progress(*events: Event) -> Progress:
    made = Progress()
    for event in events:
        made.on(event, (lambda: ValueError("first")) if event is Event.FAIL else None)
    return made


def test_each_backward_is_forgotten_once_whatever_happens() -> None:
    for events in itertools.product(Event, repeat=5):
        part = Progress()
        actions = [part.on(event) for event in events]
        assert actions.count(Action.FORGET) == (part.state is State.OVER), events
        assert actions.count(Action.START) <= 1, events


def test_the_first_error_counts() -> None:
    part = progress(Event.BEGIN, Event.FAIL)
    part.on(Event.FAIL, lambda: ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        part.check()


@pytest.mark.parametrize("event", [Event.NEWS, Event.FAIL])
def test_news_and_errors_end_a_wait(event: Event) -> None:
    part = progress(Event.BEGIN)
    asked = threading.Event()

    def ready() -> bool:
        asked.set()
        return False

    waiting = threading.Thread(target=part.wait, args=[ready])
    waiting.start()
    assert asked.wait(SECONDS)
    part.on(event, ValueError if event is Event.FAIL else None)
    waiting.join(SECONDS)
    assert not waiting.is_alive()


def test_nobody_waits_for_what_has_come_already() -> None:
    progress(Event.BEGIN).wait(lambda: True)
    progress(Event.BEGIN, Event.FAIL).wait(lambda: False)

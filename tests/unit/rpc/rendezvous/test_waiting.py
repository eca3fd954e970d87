from __future__ import annotations

import signal
import threading

import pytest

from rpc.errors import RendezvousTimeoutError
from rpc.rendezvous import waiting
from rpc.rendezvous.waiting import Abandoned, Backoff, OutOfTime, Waiting, run_with_deadline


def test_result_and_error_come_from_the_helper() -> None:
    assert run_with_deadline(lambda _: threading.current_thread() is threading.main_thread(), 5, "x") is False

    def fail(_: Waiting) -> None:
        raise LookupError("what was missing")

    with pytest.raises(LookupError, match="what was missing"):
        run_with_deadline(fail, 5, "x")


def test_work_that_is_stuck_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_GRACE_SECONDS", 0.05)
    stuck = threading.Event()
    with pytest.raises(RendezvousTimeoutError, match=r"the store .* has not answered for 0\.1 s"):
        run_with_deadline(lambda _: stuck.wait(10), 0.1, "the store")
    stuck.set()


def test_work_left_behind_ends_at_its_next_pause() -> None:
    ended = threading.Event()
    started = threading.Event()

    def work(waiting: Waiting) -> None:
        started.set()
        try:
            waiting.pause(30)
        except Abandoned:
            ended.set()

    def interrupt() -> None:
        started.wait(10)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_with_deadline(work, 60, "x")
    assert ended.wait(10)


def test_pause_ends_with_the_deadline() -> None:
    waiting = Waiting(0.02)
    with pytest.raises(OutOfTime):
        waiting.pause(10)
    assert waiting.remaining == 0


def test_pauses_grow_to_a_limit() -> None:
    pauses: list[float] = []

    class Recorder(Waiting):
        def pause(self, seconds: float) -> None:
            pauses.append(seconds)

    backoff = Backoff(Recorder(1), 0.004)
    for _ in range(6):
        backoff.pause()
    backoff.restart()
    backoff.pause()
    assert pauses[0] == pauses[-1] == 0.001
    assert pauses[1:-1] == sorted(pauses[1:-1])
    assert max(pauses) == 0.004

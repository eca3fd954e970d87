"""Signals by which engines announce that they take a job's machines away."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

import farcall
from rpc.errors import RpcError
from rpc.runtime.preemption import SIGNALS, Watch
from tests.support.workers import RunWorkers, Worker


def called_back(_: Worker) -> tuple[bool, int]:
    called, late = threading.Event(), threading.Event()
    removed = farcall.on_preempted(lambda: pytest.fail("this one was taken back"))
    farcall.on_preempted(called.set)
    removed.close()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert called.wait(60)
    farcall.on_preempted(late.set)
    assert late.wait(60)
    return farcall.preempted(), farcall.REQUEUE_STATUS


@pytest.fixture
def watch() -> Iterator[Watch]:
    watching = Watch()
    yield watching
    watching.close()


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_announces_a_preemption(watch: Watch, number: signal.Signals) -> None:
    assert not watch.preempted
    os.kill(os.getpid(), number)
    assert watch.preempted


def test_the_programs_own_handler_is_called_and_put_back() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    own = signal.getsignal(signal.SIGUSR1)
    try:
        watching = Watch()
        os.kill(os.getpid(), signal.SIGUSR1)
        watching.close()
        assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        watching = Watch()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not watching.preempted
        watching.close()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_another_thread_is_told_that_it_cannot_watch() -> None:
    said: list[str] = []

    def ask() -> None:
        try:
            Watch()
        except RpcError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert said == ["signals can be watched from the main thread only: ask there first"]


def test_callbacks_run_once_also_those_that_come_late(run_workers: RunWorkers) -> None:
    assert run_workers(called_back, 1) == [(True, 75)]

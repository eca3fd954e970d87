"""The thread that keeps a core awake, as the kernel sees it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpc.awake import spinner
from rpc.awake.spinner import AVAILABLE, Spinner, current_core, spinning
from tests.support.streams import until
from tests.unit.rpc.awake.threads import idle_threads

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no such threads")


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    """Each test ends with its threads."""
    yield
    until(lambda: not idle_threads())
    assert not spinning


def status_of(thread: Path) -> dict[str, str]:
    lines = (thread / "status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_it_runs_on_its_core_alone_at_the_lowest_priority_until_it_is_stopped() -> None:
    core = max(os.sched_getaffinity(0))
    kept = Spinner(core)
    try:
        (thread,) = idle_threads()
        assert os.sched_getaffinity(int(thread.name)) == {core}
        assert list(spinning) == [kept]
    finally:
        kept.stop()
    assert not spinning


def test_it_takes_no_signals_and_leaves_those_of_the_thread_that_starts_it() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    kept = Spinner(current_core())
    try:
        (thread,) = idle_threads()
        blocked = int(status_of(thread)["SigBlk"], 16)
        assert all(blocked >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM))
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before | {signal.SIGUSR2}
    finally:
        kept.stop()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("core", [-1, 1023, 1024, 1 << 40])
def test_a_core_that_there_is_not_is_refused_and_no_thread_stays(core: int) -> None:
    with pytest.raises(OSError, match=r"core|argument"):
        Spinner(core)
    assert not spinning


def test_it_uses_time_of_its_core_until_it_is_stopped() -> None:
    kept = Spinner(current_core())
    try:
        (thread,) = idle_threads()
        until(lambda: int((thread / "stat").read_text().rsplit(")", 1)[1].split()[11]))
    finally:
        kept.stop()


def test_those_that_have_ended_are_forgotten_when_the_next_begins() -> None:
    for _ in range(3):
        Spinner(current_core()).stop()
        until(lambda: not idle_threads())
    last = Spinner(current_core())
    try:
        assert not spinner._told_to_end
    finally:
        last.stop()


def test_a_forked_child_has_none_and_can_start_its_own() -> None:
    Spinner(current_core()).stop()
    kept = Spinner(current_core())
    child = os.fork()
    if not child:
        good = False
        try:
            good = not spinning and not spinner._told_to_end and not idle_threads()
            Spinner(current_core())
            good = good and len(idle_threads()) == 1
        finally:
            os._exit(0 if good else 1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert list(spinning) == [kept]
    finally:
        kept.stop()

"""The thread that keeps a core awake, as the kernel sees it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rpc.awake import spinner
from rpc.awake.spinner import AVAILABLE, Spinner, current_core, spinning
from tests.rpc.streams import until

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no such threads")


def idle_threads() -> list[Path]:
    """The threads of this process that run only where nobody else does."""
    return [
        thread
        for thread in Path("/proc/self/task").iterdir()
        if os.sched_getscheduler(int(thread.name)) == os.SCHED_IDLE
    ]


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
    until(lambda: not idle_threads())


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
    until(lambda: not idle_threads())


@pytest.mark.parametrize("core", [-1, 1023, 1024, 1 << 40])
def test_a_core_that_there_is_not_is_refused_and_no_thread_stays(core: int) -> None:
    with pytest.raises(OSError, match=r"core|argument"):
        Spinner(core)
    assert not spinning
    until(lambda: not idle_threads())


def test_it_uses_time_of_its_core_until_it_is_stopped() -> None:
    clock = int(os.sysconf("SC_CLK_TCK"))
    kept = Spinner(current_core())
    try:
        (thread,) = idle_threads()
        until(lambda: int((thread / "stat").read_text().rsplit(")", 1)[1].split()[11]) > clock // 50)
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
    kept = Spinner(current_core())
    child = os.fork()
    if not child:
        good = not spinning and not idle_threads()
        own = Spinner(current_core())
        good = good and len(idle_threads()) == 1
        own.stop()
        os._exit(0 if good else 1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert list(spinning) == [kept]
    finally:
        kept.stop()

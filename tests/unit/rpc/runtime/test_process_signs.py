"""What the kernel says about processes, and what it does not."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading

import pytest

from rpc.runtime import process_signs as module
from rpc.runtime.process_signs import (
    UNKNOWN,
    computes,
    has_ended,
    process_signs,
    stat_fields,
    waited_for_core,
)
from tests.support.streams import until


def test_process_that_runs_computes() -> None:
    signs = process_signs(os.getpid())
    assert signs is not None
    assert signs.busy
    assert computes(signs, signs)


def test_process_that_has_ended_does_not_compute() -> None:
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    assert process_signs(process) is None
    assert not computes(process_signs(os.getpid()), None)


def test_process_has_ended_before_its_parent_has_waited_for_it() -> None:
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert has_ended(process)
    os.waitpid(process, 0)
    assert has_ended(process)
    assert not has_ended(os.getpid())


def test_process_has_ended_once_its_descriptors_are_closed() -> None:
    """The connection of a worker that was killed ends before the kernel tells the end of its process."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    ours, theirs = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(ours)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # ends once its parent waits
        os._exit(0)
    os.close(theirs)
    try:
        assert not os.read(ours, 1)
        assert has_ended(process)
    finally:
        os.close(ours)
        os.waitpid(process, 0)
        os.sched_setaffinity(0, cores)


def test_process_has_not_ended_while_a_thread_of_it_runs() -> None:
    process = os.fork()
    if process == 0:
        threading.Thread(target=signal.pause).start()
        ctypes.CDLL(None).pthread_exit(None)
    until(lambda: stat_fields(f"/proc/{process}/stat")[0] == "Z")
    assert not has_ended(process)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def test_process_has_not_ended_while_its_threads_end_and_start_others() -> None:
    process = os.fork()
    if process == 0:

        def start_another() -> None:
            threading.Thread(target=start_another).start()

        start_another()
        ctypes.CDLL(None).pthread_exit(None)
    try:
        until(lambda: stat_fields(f"/proc/{process}/stat")[0] == "Z")
        assert not any(has_ended(process) for _ in range(5000))
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_process_is_not_held_to_have_ended_where_this_one_lacks_descriptors_or_memory(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(_: str) -> list[str]:
        raise OSError(code, os.strerror(code))

    before = process_signs(os.getpid())
    monkeypatch.setattr(module, "stat_fields", fail)
    assert process_signs(os.getpid()) is UNKNOWN
    assert computes(before, UNKNOWN)


def test_wait_for_a_core_grows() -> None:
    first = waited_for_core()
    assert 0 <= first <= waited_for_core()

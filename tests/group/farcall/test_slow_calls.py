"""A call without an answer is reported in the log: who waits, at which line, and what the callee does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

import rpc
from rpc.errors import RpcTimeoutError
from rpc.runtime.current import current_agent
from tests.support.serving import WAIT_SECONDS, in_worker0, open_gate, serve, wait_at_gate
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

SLOW = 0.3

FILLING = 400
"""Number of calls that keep a worker with one thread busy: it adds 20 threads a second at most."""

_here: dict[str, Any] = {}
"""What functions here wait for, in their own process."""


def prepare() -> None:
    lock = threading.Lock()
    lock.acquire()
    _here.update(lock=lock, event=threading.Event(), loop=None)


def release() -> None:
    _here["lock"].release()
    _here["event"].set()
    if _here["loop"] is not None:
        _here["loop"].call_soon_threadsafe(_here["released"].set)


def take_lock() -> None:
    with _here["lock"]:
        pass


def wait_for_event() -> None:
    _here["event"].wait()


def sleep_until_released() -> None:
    while not _here["event"].is_set():
        time.sleep(0.5)


def compute_until_released() -> None:
    while not _here["event"].is_set():
        sum(range(10_000))


def train_until_released() -> None:
    while not _here["event"].is_set():
        until_then = time.thread_time() + 0.002
        while time.thread_time() < until_then:
            pass
        time.sleep(0.02)


async def await_event() -> None:
    released = asyncio.Event()
    _here.update(loop=asyncio.get_running_loop(), released=released)
    await released.wait()


MORE = "; `farcall why` says more"
"""The end of each report."""


class Reports(logging.Handler):
    """The reports of slow calls in this process; those that are no warnings begin with ``info:``."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if MORE not in line:
            line += " (without what says more)"
        if record.levelno < logging.WARNING:
            line = f"info: {line}"
        self._lines.put(line.removesuffix(MORE))

    def until(self, pattern: str) -> str:
        """The first line that matches."""
        seen: list[str] = []
        while True:
            try:
                seen.append(self._lines.get(timeout=WAIT_SECONDS))
            except queue.Empty:
                pytest.fail(f"no line like {pattern!r} among {seen}")
            if re.search(pattern, seen[-1]):
                return seen[-1]

    def is_empty(self) -> bool:
        return self._lines.empty()


@contextlib.contextmanager
def reports() -> Iterator[Reports]:
    handler = Reports()
    log = logging.getLogger("farcall.observe.worker.slow_calls")
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextlib.contextmanager
def in_thread(function: Callable[..., Any], *args: Any) -> Iterator[None]:
    """Meanwhile, a thread named ``caller`` runs this."""
    thread = threading.Thread(target=function, args=args, name="caller", daemon=True)
    thread.start()
    yield
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def call(worker: str, function: Callable[..., Any]) -> None:
    rpc.rpc_sync(worker, function, timeout=0)


HERE = r"\S*test_slow_calls\.py:\d+"
WAITED = rf"^worker0: caller has waited [\d.]+ s for worker1: {{0}} \({HERE}\); worker1 {{1}} runs {{0}}, "
THREAD = r"farcall-\d+"

CALLEES: tuple[tuple[Callable[..., Any], str], ...] = (
    (take_lock, rf"waits for the lock `_here\['lock'\]`, at {HERE} in take_lock"),
    (sleep_until_released, rf"sleeps, at {HERE} in sleep_until_released"),
    (compute_until_released, rf"computes, at {HERE} in compute_until_released"),
    (train_until_released, rf"(computes|sleeps|runs), at {HERE} in train_until_released"),
    (await_event, rf"which awaits Event\.wait, at {HERE} in await_event"),
)


AT_WORK = (compute_until_released, train_until_released)
"""Those that make progress: their reports are no warnings."""


@in_worker0(slow_call_seconds=SLOW)
def test_report_says_what_the_callee_does() -> None:
    with reports() as lines:
        for function, does in CALLEES:
            rpc.rpc_sync("worker1", prepare)
            with in_thread(call, "worker1", function):
                level = "^info: " if function in AT_WORK else "^"
                runs_on = "coroutine" if function is await_event else THREAD
                lines.until(WAITED.format(function.__name__, runs_on).replace("^", level) + does)
                rpc.rpc_sync("worker1", release)


# ---- chains


def call_take_lock_of_worker0() -> None:
    rpc.rpc_sync("worker0", take_lock, timeout=0)


async def await_take_lock_of_worker2() -> None:
    await rpc.rpc_async("worker2", take_lock, timeout=0)


@in_worker0(slow_call_seconds=SLOW)
def test_calls_back_to_the_caller_are_followed() -> None:
    prepare()
    with reports() as lines, in_thread(call, "worker1", call_take_lock_of_worker0):
        lines.until(
            rf"caller has waited .*; worker1 {THREAD} waits for worker0: take_lock, at {HERE} in "
            rf"call_take_lock_of_worker0; worker0 {THREAD} runs take_lock, waits for the lock .*, at {HERE} "
            "in take_lock"
        )
        release()


@in_worker0(3, slow_call_seconds=SLOW)
def test_coroutine_that_waits_for_a_third_worker() -> None:
    rpc.rpc_sync("worker2", prepare)
    with reports() as lines, in_thread(call, "worker1", await_take_lock_of_worker2):
        lines.until(
            rf"; worker1 .* waits for worker2: take_lock, at {HERE} in await_take_lock_of_worker2; "
            rf"worker2 {THREAD} runs take_lock, waits for the lock .*, at {HERE} in take_lock"
        )
        rpc.rpc_sync("worker2", release)


def serve_slowly(worker: Worker) -> None:
    serve(worker, slow_call_seconds=0)


def call_wait_for_first() -> None:
    rpc.rpc_sync("worker0", wait_for_first, timeout=0)


def wait_for_first() -> None:
    _here["known"].wait()
    with contextlib.suppress(CancelledError):
        _here["first"].wait()


@in_worker0(slow_call_seconds=SLOW)
def test_cycle_of_calls_is_named() -> None:
    _here["known"] = threading.Event()
    with reports() as lines:
        _here["first"] = rpc.rpc_async("worker1", call_wait_for_first, timeout=0)
        _here["known"].set()
        lines.until(rf"; that waits for worker0 {THREAD} again: this is a cycle$")
        _here["first"].cancel()


@in_worker0(slow_call_seconds=30)
def test_error_of_a_timeout_in_a_cycle_advises_no_longer_one() -> None:
    text = ""
    while "this is a cycle" not in text:  # which is looked for shortly before the end, and may come too late
        _here["known"] = threading.Event()
        _here["first"] = rpc.rpc_async("worker1", call_wait_for_first, timeout=6)
        _here["known"].set()
        with pytest.raises(RpcTimeoutError) as caught:
            _here["first"].wait()
        text = str(caught.value)
    assert re.search(r"has not answered\. After .*; that waits for .* again: this is a cycle\.$", text)
    assert "If it may take longer" not in text


# ---- callees that run nothing, or do not answer


def test_stopped_callee(run_workers: RunWorkers) -> None:
    workers = run_workers.start([report_stopped, serve_slowly])
    workers[1].wait_for("at the gate")
    workers[1].stop()
    workers[0].tell("stopped")
    workers[0].wait_for("reported")
    workers[1].resume()
    workers[0].tell("resumed")
    workers.results()


def report_stopped(worker: Worker) -> None:
    with worker.group(slow_call_seconds=SLOW), reports() as lines, in_thread(call, "worker1", wait_at_gate):
        worker.wait_for("stopped")
        line = lines.until(r"; worker1 is stopped by a signal \(SIGSTOP, Ctrl-Z\): process \d+")
        worker.report("reported", line)
        worker.wait_for("resumed")
        rpc.rpc_sync("worker1", open_gate)


def test_callee_whose_threads_are_busy(run_workers: RunWorkers) -> None:
    workers = run_workers.start([report_queued, serve_with_one_thread, fill])
    workers[1].wait_for("busy")
    workers[0].tell("busy")
    workers[0].wait_for("reported")
    workers[1].tell("reported")
    workers.results()


def report_queued(worker: Worker) -> None:
    with worker.group(slow_call_seconds=SLOW), reports() as lines:
        worker.wait_for("busy")
        with in_thread(call, "worker1", wait_for_event):
            line = lines.until(
                rf"; queued at worker1, behind .*; worker1 {THREAD} runs wait_for_event, waits"
            )
            worker.report("reported", line)


def serve_with_one_thread(worker: Worker) -> None:
    prepare()
    with worker.group(slow_call_seconds=0, num_worker_threads=1, max_worker_threads=1):
        until(lambda: current_agent().get_debug_info()["agent.queued_tasks"] > FILLING // 2)
        worker.report("busy")
        worker.wait_for("reported")
        release()


def fill(worker: Worker) -> None:
    with worker.group(slow_call_seconds=0):
        for each in [rpc.rpc_async("worker1", wait_for_event, timeout=0) for _ in range(FILLING)]:
            each.wait()


# ---- timeouts, and calls that nobody should hear of


@in_worker0(slow_call_seconds=30)
def test_error_of_a_timeout_says_where_the_callee_was() -> None:
    rpc.rpc_sync("worker1", prepare)
    text = ""
    while "After" not in text:  # the callee is asked after 4.8 s and once more, and may answer too late
        began = time.monotonic()
        with pytest.raises(RpcTimeoutError) as caught:
            rpc.rpc_sync("worker1", wait_for_event, timeout=6)
        assert time.monotonic() - began < 13, "the error comes when the time is over"
        text = str(caught.value)
    assert re.search(
        rf"has not answered\. After [\d.]+ s: worker1 {THREAD} runs wait_for_event, waits for the Event .*, "
        rf"at {HERE} in wait_for_event\. If it may take longer",
        text,
    )
    rpc.rpc_sync("worker1", release)


@in_worker0(slow_call_seconds=0)
def test_callees_are_not_asked_where_that_is_turned_off() -> None:
    rpc.rpc_sync("worker1", prepare)
    with reports() as lines:
        with pytest.raises(RpcTimeoutError, match=r"has not answered\. If it may take longer"):
            rpc.rpc_sync("worker1", wait_for_event, timeout=2)
        assert lines.is_empty()
    rpc.rpc_sync("worker1", release)

"""The executor: every task runs, soon, on a thread of its own if it has to, and nothing is left of it."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rpc.runtime import executor as module
from rpc.runtime.executor import Executor, Task
from rpc.runtime.interrupts import interruptible, protected
from tests.support.interrupting import press
from tests.support.stepping import Step
from tests.support.streams import SOON, until


@pytest.fixture
def make() -> Iterator[Callable[[int], Executor]]:
    """Makes executors that are stopped after the test."""
    made: list[Executor] = []

    def make_one(workers: int) -> Executor:
        made.append(Executor(workers, f"executor{len(made)}"))
        return made[-1]

    yield make_one
    for each in made:
        assert each.stop()


def meeting(count: int) -> tuple[Task, threading.Event]:
    """A task that ends only when ``count`` of it run at once, and the event of that moment."""
    met = threading.Event()
    barrier = threading.Barrier(count, action=met.set)
    return (lambda _: barrier.wait(SOON), None), met


def warmed_up(executor: Executor, threads: int) -> Executor:
    """Leaves the executor with that many idle threads."""
    task, met = meeting(threads)
    executor.submit_batch([task] * threads)
    assert met.wait(SOON)
    until(lambda: executor.counts()["idle_threads"] == threads)
    return executor


def test_a_task_runs_with_its_argument_on_a_thread_of_the_executor(make: Callable[[int], Executor]) -> None:
    executor = make(2)
    seen: list[tuple[str, bool, str]] = []
    done = threading.Event()

    def task(argument: str) -> None:
        thread = threading.current_thread()
        seen.append((argument, executor.owns_current_thread() and thread.daemon, thread.name))
        done.set()

    executor.submit((task, "argument"))
    assert done.wait(SOON)
    assert seen == [("argument", True, "executor0-1")]
    assert not executor.owns_current_thread()


def test_an_executor_has_at_least_one_thread() -> None:
    with pytest.raises(ValueError, match="at least one thread, not 0"):
        Executor(0, "none")


def test_tasks_begin_in_the_order_in_which_they_came(
    make: Callable[[int], Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = warmed_up(make(1), 1)
    refuse_threads(monkeypatch)
    begun: list[int] = []
    gate, done = threading.Event(), threading.Event()
    executor.submit((lambda _: gate.wait(SOON), None))
    for first in range(0, 60, 3):
        executor.submit_batch([(begun.append, first), (begun.append, first + 1)])
        executor.submit((begun.append, first + 2))
    executor.submit((lambda _: done.set(), None))
    gate.set()
    assert done.wait(SOON)
    assert begun == list(range(60))


@pytest.mark.parametrize("idle", [1, 2, 3])
@pytest.mark.parametrize("workers", [3, 8])
def test_a_batch_larger_than_the_idle_threads_is_begun_in_full(
    make: Callable[[int], Executor], workers: int, idle: int
) -> None:
    executor = warmed_up(make(workers), idle)
    task, met = meeting(idle + 1)
    executor.submit_batch([task] * (idle + 1))
    assert met.wait(SOON)


def test_threads_above_the_base_number_retire_when_idle_and_no_others_do(
    make: Callable[[int], Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.02)
    executor = make(3)
    all_idle = {"threads": 3, "idle_threads": 3, "active_tasks": 0, "queued_tasks": 0}
    for _ in range(2):
        task, met = meeting(12)
        executor.submit_batch([task] * 12)
        assert met.wait(SOON)
        until(lambda: executor.counts() == all_idle)


def test_no_task_is_lost_with_eight_submitting_threads_and_retiring_workers(
    make: Callable[[int], Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.0005)
    executor = make(2)
    results: list[int] = []

    def submit(base: int) -> None:
        for index in range(base, base + 300, 3):
            executor.submit((results.append, index))
            executor.submit_batch([(results.append, index + 1), (results.append, index + 2)])

    submitters = [threading.Thread(target=submit, args=(1000 * index,)) for index in range(8)]
    for thread in submitters:
        thread.start()
    for thread in submitters:
        thread.join()
    until(lambda: not executor.active())
    assert sorted(results) == [1000 * thread + index for thread in range(8) for index in range(300)]


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_task_that_raises_is_logged_and_its_thread_lives_on(
    make: Callable[[int], Executor], caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    executor = warmed_up(make(1), 1)
    (thread,) = executor.threads()

    def fail(_: Any) -> None:
        raise error("on purpose")

    executor.submit((fail, None))
    until(lambda: executor.counts()["idle_threads"] == 1)
    assert thread.is_alive()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is error


def test_it_tells_each_time_when_no_task_is_left(make: Callable[[int], Executor]) -> None:
    executor = make(2)
    told: list[bool] = []
    event = threading.Event()

    def idle() -> None:
        told.append(executor.owns_current_thread() and not executor.active())
        event.set()

    executor.when_idle(idle)
    for round_number in range(1, 4):
        event.clear()
        executor.submit((lambda _: None, None))
        assert event.wait(SOON)
        assert told == [True] * round_number
    event.clear()
    executor.when_idle(None)
    executor.submit((lambda _: None, None))
    until(lambda: not executor.active())
    assert not event.is_set()


def test_a_failure_of_who_is_told_leaves_the_threads_alone(
    make: Callable[[int], Executor], caplog: pytest.LogCaptureFixture
) -> None:
    executor = make(1)
    executor.when_idle(lambda: 1 // 0)  # type: ignore[arg-type]
    for _ in range(2):
        done = threading.Event()
        executor.submit((lambda event: event.set(), done))
        assert done.wait(SOON)
        until(lambda: executor.counts()["idle_threads"] == 1)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError] * 2


def test_an_idle_thread_keeps_nothing_of_its_last_task_alive(make: Callable[[int], Executor]) -> None:
    class Argument:
        pass

    executor = make(1)
    argument = Argument()
    gone = weakref.ref(argument)
    executor.submit((id, argument))
    del argument
    until(lambda: executor.counts()["idle_threads"] == 1)
    gc.collect()
    assert gone() is None


def test_tasks_wait_while_the_system_gives_no_threads(
    make: Callable[[int], Executor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor = make(2)
    refusals = iter(range(3))
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name.startswith("executor0-") and next(refusals, None) is not None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    done = threading.Event()
    executor.submit((lambda _: done.set(), None))
    assert done.wait(SOON)
    assert [record.getMessage() for record in caplog.records] == [
        "1 tasks wait, but the system gives no more threads"
    ]


# ---- stopping


def test_stop_waits_for_running_tasks_and_drops_the_waiting_ones_except_completions(
    make: Callable[[int], Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = warmed_up(make(1), 1)
    refuse_threads(monkeypatch)
    begun, gate = threading.Event(), threading.Event()
    finished: list[str] = []

    def slow(_: Any) -> None:
        begun.set()
        gate.wait(SOON)
        finished.append("running")

    executor.submit((slow, None))
    assert begun.wait(SOON)
    future: torch.futures.Future[int] = torch.futures.Future()
    executor.submit_batch([*[(finished.append, "waiting")] * 3, (future.set_result, 1)])
    assert executor.active() == 5
    assert not executor.stop(timeout=0.01)
    assert future.value() == 1
    assert executor.active() == 1
    gate.set()
    assert executor.stop()
    assert finished == ["running"]


def test_after_stop_tasks_are_dropped_except_completions(make: Callable[[int], Executor]) -> None:
    executor = make(1)
    assert executor.stop()
    assert not executor.submit((pytest.fail, "it ran"))
    future: torch.futures.Future[int] = torch.futures.Future()
    executor.submit_batch([*[(pytest.fail, "it ran")] * 2, (future.set_result, 1)])
    assert future.value() == 1
    assert executor.active() == 0
    assert executor.counts()["threads"] == 0


def test_a_task_may_stop_the_executor(make: Callable[[int], Executor]) -> None:
    executor = make(2)
    results: list[bool] = []
    executor.submit((lambda _: results.append(executor.stop()), None))
    until(lambda: results)
    assert results == [True]
    until(lambda: executor.counts()["threads"] == 0)


# ---- the ceiling


def test_tasks_that_need_more_threads_than_the_ceiling_get_on_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = Executor(2, "low", ceiling=4)
    task, met = meeting(8)
    executor.submit_batch([task] * 8)
    assert met.wait(SOON)
    assert executor.stop()
    assert caplog.text.count("(max_worker_threads)") == 1


@pytest.mark.usefixtures("deferred")
def test_ctrl_c_at_any_instruction_of_stop_leaves_no_thread() -> None:
    number, taken = 0, True
    while taken:
        number += 1
        executor = warmed_up(Executor(1, "stopped"), 1)
        threads = [*executor.threads(), executor._monitor]
        taken = interrupt_stop(executor, number)
        for thread in threads:
            thread.join(SOON)
            assert not thread.is_alive(), f"the interrupt came at instruction {number}"
    assert number > 100


@protected  # for Ctrl-C may come while the one before is being dealt with
def interrupt_stop(executor: Executor, number: int) -> bool:
    """Whether so many instructions are run when it is stopped."""
    with contextlib.suppress(KeyboardInterrupt), Step(number, press, files={module.__file__}) as step:
        stop(executor)
    with contextlib.suppress(KeyboardInterrupt):
        press_here()  # if the other has not been raised yet, it comes with this
    return step.taken


@interruptible
def stop(executor: Executor) -> None:
    executor.stop()


@interruptible
def press_here() -> None:
    press()


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system start no more threads."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_task_runs_where_the_system_gives_no_thread(
    make: Callable[[int], Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make(2)
    refuse_threads(monkeypatch)
    done = [threading.Event() for _ in range(3)]
    executor.submit_batch([(lambda _, event=event: event.set(), None) for event in done])
    assert all(event.wait(SOON) for event in done)
    until(lambda: executor.active() == 0)


def test_task_that_must_not_wait_for_others_is_refused_where_there_is_no_thread(
    make: Callable[[int], Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = warmed_up(make(1), 1)
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()
    refuse_threads(monkeypatch)

    def first(_: object) -> None:
        begun.set()
        go_on.wait(SOON)

    executor.submit_at_once((first, None))
    assert begun.wait(SOON)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        executor.submit_at_once((lambda _: done.set(), None))
    go_on.set()
    until(lambda: executor.active() == 0)
    assert not done.is_set()


class OneTask:
    """A source with one task; it records the places that are claimed, and that a thread waits in."""

    def __init__(self) -> None:
        self.claimed: list[int] = []
        self.waited_in: list[int] = []
        self.done = threading.Event()
        self._tasks: list[Task] = [(lambda _: self.done.set(), None)]

    def claim(self, *, idle: bool) -> int:
        self.claimed.append(len(self.claimed) + 1)
        return self.claimed[-1]

    def next_task(self, claimed: int, timeout: float | None, /) -> Task | None:
        self.waited_in.append(claimed)
        return self._tasks.pop() if self._tasks else None

    def leave(self) -> None:
        pass

    def wake(self) -> None:
        pass


def test_a_thread_that_is_lent_twice_keeps_the_place_that_it_has_claimed(
    make: Callable[[int], Executor],
) -> None:
    executor, source = make(1), OneTask()

    def task(_: object) -> None:
        executor.lend(source, at_once=True)
        executor.lend(source, at_once=False)

    executor.submit((task, None))
    assert source.done.wait(SOON)
    assert source.waited_in[0] == 1

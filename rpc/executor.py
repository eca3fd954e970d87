"""The threads that run user code: as many as are needed, never so few that a call waits for ever.

A task goes straight to an idle thread where there is one, and else into a backlog. Up to ``workers``
threads are started as tasks come. They may all be blocked — in locks, in ``Future.wait``, in calls that
wait for calls — where nobody can see it, so a monitor looks at the backlog once a tick: if tasks wait and
none was finished or begun since the last look, it starts more threads, twice as many each time. Threads
above the base number retire when they have been idle for a while.

Waking a thread costs two switches of the interpreter, so a batch of tasks wakes one thread only, and
each thread that takes a task while others wait wakes the next: quick tasks are all done by the first
thread before the second has the interpreter, slow or blocking ones spread at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

__all__ = ["Executor", "Task"]

logger = logging.getLogger(__name__)

Task = tuple[Callable[..., object], Any]
"""A function and its single argument."""

_TICK: Final = 0.005
_IDLE_SECONDS: Final = 10.0


class _Thread:
    """A worker thread's mailbox: ``wake`` is released when ``task`` has been put."""

    __slots__ = ("task", "wake")

    def __init__(self, task: Task | None) -> None:
        self.task = task
        self.wake = threading.Lock()
        self.wake.acquire()


class Executor:
    """Runs tasks on daemon threads. All methods may be called from any thread.

    Args:
        workers: threads that are started without hesitation; more only when these make no progress.
        name: prefix of the threads' names.

    Example::

        executor = Executor(workers=16, name="farcall")
        executor.submit((print, "on another thread"))
        executor.stop()
    """

    def __init__(self, workers: int, name: str) -> None:
        if workers < 1:
            raise ValueError(f"an executor needs at least one thread, not {workers}")
        self._workers = workers
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[_Thread] = []
        self._backlog: deque[Task] = deque()
        self._threads: set[threading.Thread] = set()
        self._started = 0
        self._running = 0
        self._begun = 0
        self._finished = 0
        self._surge = 1
        self._stopped = False
        self._starved = threading.Event()
        self._on_idle: Callable[[], None] | None = None
        self._monitor = threading.Thread(target=self._watch, name=f"{name}-monitor", daemon=True)
        self._monitor.start()

    def submit(self, task: Task) -> None:
        """Run one task soon. After ``stop`` tasks are dropped."""
        self.submit_batch((task,))

    def submit_batch(self, tasks: Sequence[Task]) -> None:
        """Run several tasks soon, waking one thread, which wakes others as needed."""
        watch = False
        with self._lock:
            if self._stopped:
                return
            self._running += len(tasks)
            if self._idle and not self._backlog:
                thread = self._idle.pop()
                thread.task = tasks[0]
                self._begun += 1
                self._backlog.extend(tasks[1:])
                thread.wake.release()
            else:
                self._backlog.extend(tasks)
                self._wake_another()
            watch = bool(self._backlog) and not self._idle and not self._starved.is_set()
        if watch:
            self._starved.set()

    def active(self) -> int:
        """Tasks submitted and not yet finished."""
        return self._running

    def counts(self) -> dict[str, int]:
        """Threads and tasks right now, for debug information."""
        with self._lock:
            return {
                "threads": len(self._threads),
                "idle_threads": len(self._idle),
                "active_tasks": self._running,
                "queued_tasks": len(self._backlog),
            }

    def when_idle(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called, on a worker thread, each time that no task is left."""
        self._on_idle = callback

    def owns_current_thread(self) -> bool:
        """Whether the caller runs on one of the executor's threads."""
        return threading.current_thread() in self._threads

    def stop(self, timeout: float | None = 5.0) -> bool:
        """Take no more tasks, drop those that wait, and join the threads.

        Args:
            timeout: seconds to wait for tasks that still run; their threads are daemons and are left
                behind after that.

        Returns:
            Whether all threads have ended.
        """
        with self._lock:
            self._stopped = True
            self._running -= len(self._backlog)
            self._backlog.clear()
            idle, self._idle = self._idle, []
        for thread in idle:
            thread.wake.release()
        self._starved.set()
        deadline = None if timeout is None else time.monotonic() + timeout
        current = threading.current_thread()
        ended = True
        for worker in [*self._threads, self._monitor]:
            if worker is current:
                continue
            worker.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            ended = ended and not worker.is_alive()
        return ended

    def _wake_another(self) -> None:
        """With the lock held and a backlog: let one more thread take from it."""
        if self._idle:
            thread = self._idle.pop()
            thread.task = self._backlog.popleft()
            self._begun += 1
            thread.wake.release()
        elif len(self._threads) < self._workers:
            self._start_thread()

    def _start_thread(self) -> None:
        mailbox = _Thread(None)
        self._started += 1
        worker = threading.Thread(
            target=self._run, args=(mailbox,), name=f"{self._name}-{self._started}", daemon=True
        )
        self._threads.add(worker)
        worker.start()

    def _run(self, mailbox: _Thread) -> None:
        task: Task | None = None
        while True:
            task = self._next(mailbox, finished=task is not None)
            if task is None:
                return
            function, argument = task
            try:
                function(argument)
            except BaseException:
                # A task answers its caller itself: what escapes is a defect, and must not end the thread.
                logger.exception("an internal task failed")
            function = argument = None  # type: ignore[assignment]  # keep nothing alive while idle

    def _next(self, mailbox: _Thread, finished: bool) -> Task | None:
        idle_callback: Callable[[], None] | None = None
        with self._lock:
            if finished:
                self._finished += 1
                self._running -= 1
                if not self._running:
                    idle_callback = self._on_idle
            if idle_callback is None:
                task = self._take(mailbox)
                if task is not None:
                    return task
        if idle_callback is not None:
            idle_callback()
            with self._lock:
                task = self._take(mailbox)
                if task is not None:
                    return task
        while True:
            timeout = _IDLE_SECONDS if len(self._threads) > self._workers else -1.0
            if mailbox.wake.acquire(timeout=timeout):
                task, mailbox.task = mailbox.task, None
                if task is None:
                    self._threads.discard(threading.current_thread())
                    return None
                if self._backlog:
                    with self._lock:
                        if self._backlog and self._idle:
                            self._wake_another()
                return task
            with self._lock:
                if mailbox in self._idle:
                    self._idle.remove(mailbox)
                    self._threads.discard(threading.current_thread())
                    return None

    def _take(self, mailbox: _Thread) -> Task | None:
        """With the lock held: the next task of the backlog; none puts the thread among the idle."""
        if self._stopped:
            # Nobody will wake this thread any more: let it find an empty mailbox.
            mailbox.wake.release()
            return None
        if not self._backlog:
            self._idle.append(mailbox)
            return None
        task = self._backlog.popleft()
        self._begun += 1
        if self._backlog:
            self._wake_another()
        return task

    def _watch(self) -> None:
        """The monitor: sleeps until there is a backlog, then ticks until there is none."""
        while True:
            self._starved.wait()
            progress = -1
            while not self._stopped:
                time.sleep(_TICK)
                with self._lock:
                    if not self._backlog:
                        self._surge = 1
                        self._starved.clear()
                        break
                    now = self._begun + self._finished
                    if now == progress:
                        for _ in range(min(self._surge, len(self._backlog))):
                            self._start_thread()
                        self._surge *= 2
                    else:
                        self._surge = 1
                    progress = self._begun + self._finished
            if self._stopped:
                return

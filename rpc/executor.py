"""The threads that run user code: as many as are needed, never so few that a call waits for ever.

A task goes straight to an idle thread where there is one, and else into a backlog. Up to ``workers``
threads are started as tasks come. They may all be blocked — in locks, in ``Future.wait``, in calls that
wait for calls — where nobody can see it, so a monitor looks at the backlog once a tick: if tasks wait and
none was begun or finished since the last look, it starts more threads, doubling what is above the base
number each time: calls that nest 200 deep, each waiting for the next, get there in a few ticks. Threads
above the base number retire when they have been idle for a while.

Waking a thread costs two switches of the interpreter, so at most one thread is being woken at any time;
when it runs, and tasks still wait, it wakes the next. Quick tasks are thus all done by the first thread
before the second has the interpreter, slow or blocking ones spread at once. So while there is a backlog,
some thread that was woken or started is about to look at it, or the monitor ticks.
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

    def __init__(self) -> None:
        self.task: Task | None = None
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
        self._lock = threading.RLock()  # a finalizer that runs while it is held may submit something
        self._idle: list[_Thread] = []
        self._backlog: deque[Task] = deque()
        self._threads: set[threading.Thread] = set()
        self._started = 0
        self._running = 0
        self._begun = 0
        self._finished = 0
        self._waking = False
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
        with self._lock:
            if self._stopped or not tasks:
                return
            self._running += len(tasks)
            self._backlog.extend(tasks)
            self._wake_another()

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

    def drop_backlog(self) -> list[Task]:
        """Take away the tasks that no thread has begun, and return them."""
        with self._lock:
            dropped = list(self._backlog)
            self._running -= len(dropped)
            self._backlog.clear()
        return dropped

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
            self.drop_backlog()
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
        """With the lock held and a backlog: let one more thread take from it, or the monitor see to it."""
        if self._waking:
            return  # that thread will look at the backlog
        if self._idle:
            thread = self._idle.pop()
            thread.task = self._backlog.popleft()
            self._begun += 1
            self._waking = True
            thread.wake.release()
        elif (len(self._threads) >= self._workers or not self._start_thread()) and not self._starved.is_set():
            self._starved.set()

    def _start_thread(self) -> bool:
        """With the lock held; returns whether the system gave a thread."""
        worker = threading.Thread(
            target=self._run, args=(_Thread(),), name=f"{self._name}-{self._started + 1}", daemon=True
        )
        self._threads.add(worker)
        try:
            worker.start()
        except RuntimeError:
            self._threads.discard(worker)
            return False
        self._started += 1
        return True

    def _run(self, mailbox: _Thread) -> None:
        finished = False
        while True:
            task = self._next(mailbox, finished)
            if task is None:
                return
            function, argument = task
            try:
                function(argument)
            except BaseException:
                # A task answers its caller itself: what escapes is a defect, and must not end the thread.
                logger.exception("an internal task failed")
            del task, function, argument  # an idle thread keeps nothing alive
            finished = True

    def _next(self, mailbox: _Thread, finished: bool) -> Task | None:
        """The next task, as soon as there is one; None when the thread is to end."""
        with self._lock:
            if finished:
                self._finished += 1
                self._running -= 1
            if self._on_idle is None or self._running or not finished:
                task = self._take(mailbox)
                if task is not None:
                    return task
                idle_callback = None
            else:
                idle_callback = self._on_idle
        if idle_callback is not None:
            try:
                idle_callback()
            except Exception:
                logger.exception("what was to be told that no task is left failed")
            with self._lock:
                task = self._take(mailbox)
                if task is not None:
                    return task
        return self._wait(mailbox)

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

    def _wait(self, mailbox: _Thread) -> Task | None:
        """Among the idle: wait for a task. Too many idle threads retire."""
        while True:
            timeout = _IDLE_SECONDS if len(self._threads) > self._workers else -1.0
            if mailbox.wake.acquire(timeout=timeout):
                task, mailbox.task = mailbox.task, None
                if task is None:
                    self._threads.discard(threading.current_thread())
                    return None
                self._waking = False
                if self._backlog:
                    with self._lock:
                        if self._backlog:
                            self._wake_another()
                return task
            with self._lock:
                if mailbox in self._idle and len(self._threads) > self._workers:
                    self._idle.remove(mailbox)
                    self._threads.discard(threading.current_thread())
                    return None

    def _watch(self) -> None:
        """The monitor: sleeps until a task finds no thread, then ticks until there is no backlog."""
        while True:
            self._starved.wait()
            progress = self._begun + self._finished
            warned = False
            while not self._stopped:
                time.sleep(_TICK)
                with self._lock:
                    if not self._backlog:
                        self._starved.clear()
                        break
                    before, progress = progress, self._begun + self._finished
                if before == progress and not self._grow() and not warned:
                    warned = True
                    logger.warning("%d tasks wait, but the system gives no more threads", len(self._backlog))
            if self._stopped:
                return

    def _grow(self) -> bool:
        """Double the threads above the base number; returns whether there is at least one more now."""
        grown = False
        for _ in range(max(1, len(self._threads) - self._workers)):
            with self._lock:
                if self._stopped or not self._start_thread():
                    break
                grown = True
        return grown

"""The threads that run user code: as many as are needed, but never so few that calls deadlock.

Up to ``workers`` threads are started as tasks arrive. All of them may be blocked, in locks or in calls that
wait for calls, which cannot be detected directly. So a monitor checks the backlog once per tick: if tasks
wait and none was started or finished since the last check, it starts more threads, doubling the number above
the base number each time. Calls that nest 200 deep get there in a few ticks. Idle threads above the base
number retire. Beyond ``ceiling`` threads, which thousands of blocking calls reach at once, one more is
started every few ticks: tasks that wait for tasks still make progress, however deep they nest.

Waking a thread costs two switches of the GIL, so at most one thread is being woken at any time; when it runs,
and tasks still wait, it wakes the next. Quick tasks are thus all done by the first thread, slow ones spread
at once. While there is a backlog, either a thread that was woken is about to check it, or the monitor ticks.

Each task runs in a context of its own, for context variables, and with the default modes (``modes``): changes
that it leaves on its thread are undone before the next one.

A thread takes tasks without the lock, and counts its finished tasks itself. The lock is taken to become idle,
and to wake. Nothing waits while it is held: a thread is started without it, since the new thread may have to
run a finalizer that submits a task before it can say that it has begun.

A thread with nothing to do may be *lent* to a ``TaskSource``, which gives it its next task without a
hand-over; it returns there after each, and is called back if tasks find no other thread.

Tasks that are dropped, as the executor has stopped, still complete their futures: someone may wait for these.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, Final

import torch

from rpc.runtime.blocking import this_thread
from rpc.runtime.interrupts import interruptible, is_interruption, protected
from rpc.runtime.modes import modes_changed, reset_modes
from rpc.runtime.tasks import COMPLETION, Task, TaskSource

__all__ = ["Executor", "Task", "TaskSource", "complete_futures"]

logger = logging.getLogger(__name__)

_TICK: Final = 0.005
_IDLE_SECONDS: Final = 10.0
"""Time in seconds after which an idle thread retires, if there are more than the base number."""
_REFUSALS: Final = 20
"""Number of ticks in which the system gives no thread, after which the monitor runs tasks if no other thread
can.
"""

_TICKS_BEYOND_CEILING: Final = 10
"""Number of ticks without progress after which one thread beyond the ceiling is started: 20 threads
a second.
"""


class _Worker:
    """The executor's data about one thread.

    Attributes:
        finished, brought: number of tasks that the thread has finished, and got at a source; written by it
        alone.
        source: where it is lent to, or will be if there is nothing to do after its task.
        claimed: its place there, if it has claimed it already.
        wake: released when an idle thread should check the backlog.
    """

    __slots__ = ("brought", "claimed", "finished", "source", "thread", "wake")

    def __init__(self, executor: Executor, name: str) -> None:
        self.finished = 0
        self.brought = 0
        self.source: TaskSource | None = None
        self.claimed: Any = None
        self.wake = threading.Lock()
        self.wake.acquire()
        self.thread = threading.Thread(target=executor._run, args=(self,), name=name, daemon=True)

    def call(self) -> None:
        """Have the thread, idle or lent, check the backlog."""
        self.wake.release()
        if self.source is not None:
            self.source.wake()


class Executor:
    """Runs tasks on daemon threads. All methods may be called from any thread.

    Args:
        workers: number of threads that are started at once; more are started only when these make no
        progress.
        name: prefix of the threads' names.
        ceiling: number of threads beyond which they are added slowly.

    Example::

        Executor(workers=16, name="farcall").submit((print, "on another thread"))
    """

    def __init__(self, workers: int, name: str, ceiling: int = 512) -> None:
        if workers < 1:
            raise ValueError(f"an executor needs at least one thread, not {workers}")
        self._workers = workers
        self._ceiling = max(workers, ceiling)
        self._ticks_beyond = 0
        self._name = name
        self._lock = threading.RLock()  # reentrant: a finalizer that runs while it is held may submit a task
        self._idle: list[_Worker] = []
        self._lent: list[_Worker] = []
        self._current = threading.local()
        self._backlog: deque[Task] = deque()
        self._threads: dict[threading.Thread, _Worker] = {}
        self._started = 0
        self._submitted = 0
        self._ended = 0
        """Number of tasks that were dropped, or done by threads that have retired."""
        self._waking = False
        self._stopped = False
        self._is_starved = False
        """Whether the monitor was woken, and has not seen an empty backlog since."""
        self._wake = threading.Lock()
        """Released to wake the monitor. An event is not reentrant, and a finalizer may submit a task."""
        self._wake.acquire()
        self._on_idle: Callable[[], None] | None = None
        self._monitor = threading.Thread(target=self._watch, name=f"{name}-monitor", daemon=True)
        self._monitor.start()

    def threads(self) -> list[threading.Thread]:
        """The current threads."""
        with self._lock:
            return list(self._threads)

    def submit(self, task: Task) -> bool:
        """Run one task soon; false after ``stop``, when it is dropped."""
        return self.submit_batch((task,))

    @protected
    def submit_batch(self, tasks: Sequence[Task]) -> bool:
        """Run several tasks soon, waking one thread, which wakes others as needed; false after ``stop``."""
        with self._lock:
            stopped = self._stopped
            fresh = None
            if tasks and not stopped:
                self._submitted += len(tasks)
                self._backlog.extend(tasks)
                fresh = self._wake_another()
        if fresh is not None:
            self._start(fresh)
        elif stopped:
            complete_futures(tasks)
        return not stopped

    def submit_at_once(self, task: Task) -> None:
        """Run one task without waiting for others to end.

        Raises:
            RuntimeError: all threads are busy, and the system gives no more.
        """
        with self._lock:
            fresh = None if self._stopped or self._idle or self._lent else self._new_thread()
        if fresh is None:
            self.submit(task)
            return
        with self._lock:
            self._submitted += 1
            self._backlog.append(task)
        try:
            fresh.thread.start()
        except RuntimeError:
            with self._lock:
                del self._threads[fresh.thread]
                if task not in self._backlog:
                    return  # another thread has taken it
                self._backlog.remove(task)
                self._submitted -= 1
            raise

    def lend(self, source: TaskSource | None, *, at_once: bool) -> int:
        """For a task that is about to end: have its thread wait for its next task at a source, if there is
        one, and if no task waits for a thread. What it has claimed before stays claimed. Returns the number
        of tasks that wait for a thread.

        Args:
            at_once: whether the source's place is claimed now, and not when the task has ended.
        """
        waiting = len(self._backlog)
        worker: _Worker | None = getattr(self._current, "worker", None)
        if source is None or worker is None or waiting or self._stopped:
            return waiting
        claimed = source.claim(idle=True) if at_once else None
        if claimed is not None or (not at_once and worker.source is None):
            worker.source, worker.claimed = source, claimed
        return waiting

    def active(self) -> int:
        """Number of tasks that are submitted and not finished."""
        with self._lock:
            return self._submitted - self._finished()

    def counts(self) -> dict[str, int]:
        """Return the current numbers of threads and tasks, for debugging."""
        with self._lock:
            return {
                "threads": len(self._threads),
                "idle_threads": len(self._idle) + len(self._lent),
                "active_tasks": self._submitted - self._finished(),
                "queued_tasks": len(self._backlog),
            }

    def queued_before(self, argument: object) -> int | None:
        """Return how many tasks are queued before the one with this argument; None if that is not queued."""
        backlog = self._backlog.copy()
        return next((index for index, (_, each) in enumerate(backlog) if each is argument), None)

    def when_idle(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called, on a worker thread, each time that no tasks are left."""
        self._on_idle = callback

    def owns_current_thread(self) -> bool:
        """Whether the calling thread is one of the executor's."""
        return threading.current_thread() in self._threads

    @protected
    def stop(self, timeout: float | None = 5.0) -> bool:
        """Accept no more tasks, drop those that wait, join the threads, and return whether all have ended.

        Args:
            timeout: timeout in seconds for tasks that are still running; their threads are daemons, and
            abandoned then.
        """
        with self._lock:
            self._stopped = True
            dropped: list[Task] = []
            with contextlib.suppress(IndexError):
                while True:
                    dropped.append(self._backlog.popleft())
            self._ended += len(dropped)
            waiting, self._idle, self._lent = self._idle + self._lent, [], []
            self._wake_monitor()
        try:
            for worker in waiting:
                worker.call()
            deadline = None if timeout is None else time.monotonic() + timeout
            current = threading.current_thread()
            ended = True
            for thread in [*self._threads, self._monitor]:
                if thread is current:
                    continue
                _join(thread, None if deadline is None else max(0.0, deadline - time.monotonic()))
                ended = ended and not thread.is_alive()
        finally:
            complete_futures(dropped)
        return ended

    def _finished(self) -> int:
        """Return the number of tasks done or dropped so far, less those started that were never submitted;
        lock held.
        """
        return self._ended + sum(worker.finished - worker.brought for worker in self._threads.values())

    def _wake_another(self, *, may_start: bool = True) -> _Worker | None:
        """With the lock held and a backlog: have one more thread take from it, or wake the monitor. May
        return a thread that the caller must start without the lock.
        """
        if self._waking:
            return None  # that thread will check the backlog
        if may_start and not self._idle and len(self._threads) < self._workers:
            return self._new_thread()
        waiting = self._idle or self._lent
        if waiting:
            worker = waiting[-1]
            del waiting[-1]
            self._waking = True
            worker.call()
        else:
            self._wake_monitor()
        return None

    def _wake_monitor(self) -> None:
        """With the lock held: have the monitor tick."""
        if not self._is_starved:
            self._is_starved = True
            self._wake.release()

    def _new_thread(self) -> _Worker:
        """Return a thread that counts as one of the executor's, and must be started; with the lock held."""
        self._started += 1
        worker = _Worker(self, f"{self._name}-{self._started}")
        self._threads[worker.thread] = worker
        return worker

    def _start(self, worker: _Worker) -> bool:
        """Start a thread, without the lock; returns whether the system could."""
        try:
            worker.thread.start()
        except RuntimeError:
            with self._lock:
                del self._threads[worker.thread]
                if self._backlog and not self._stopped:
                    self._wake_another(may_start=False)
            return False
        return True

    def _run(self, worker: _Worker) -> None:
        self._current.worker = worker
        this_thread.runs_callees = True
        backlog = self._backlog
        checked = True
        source: TaskSource | None = None
        while True:
            try:
                function, argument = backlog.popleft()
            except IndexError:
                source = worker.source
                task = self._task_at_source(worker)
                if task is None:
                    source = None
                    if not self._wait(worker):
                        return
                    continue
                function, argument = task
                del task
            if worker.source is not None:
                worker.source.leave()
                worker.source = worker.claimed = None
            if backlog and not self._waking:
                self._spread()
            is_completion = argument is COMPLETION
            if not (is_completion or checked) and modes_changed():
                reset_modes()
            try:
                if is_completion:
                    function(argument)
                else:
                    Context().run(function, argument)
            except BaseException:
                # A task answers its caller itself: an exception that escapes is a defect, and must not end
                # the thread.
                logger.exception("an internal task failed")
            checked = not is_completion
            if checked and modes_changed():
                reset_modes()
            del function, argument  # an idle thread keeps nothing alive
            worker.finished += 1
            if source is not None:
                if worker.source is None:
                    worker.source = source  # the next task may come from where this one came from
                source = None
            if not backlog and self._on_idle is not None:
                self._tell_if_idle(self._on_idle)

    def _task_at_source(self, worker: _Worker) -> Task | None:
        """Wait for a task where the thread is lent to, or for being called back."""
        source = worker.source
        if source is None:
            return None
        claimed = worker.claimed or source.claim(idle=True)
        if claimed is None:
            worker.source = None
            return None
        self._lent.append(worker)  # a thread that calls it from here on wakes no other
        if self._backlog or self._stopped:
            task = None
            source.leave()
        else:
            is_surplus = len(self._threads) > self._workers
            task = source.next_task(claimed, _IDLE_SECONDS if is_surplus else None)
        worker.source = worker.claimed = None
        try:
            self._lent.remove(worker)
        except ValueError:  # it was called
            worker.wake.acquire()
            self._waking = False
        if task is not None:
            worker.brought += 1
        return task

    def _spread(self) -> None:
        """Have another thread take from the backlog, too: the current task may take long."""
        with self._lock:
            fresh = self._wake_another() if self._backlog else None
        if fresh is not None:
            self._start(fresh)

    def _tell_if_idle(self, callback: Callable[[], None]) -> None:
        if self.active():
            return
        try:
            callback()
        except Exception:
            logger.exception("the callback for an idle executor failed")

    def _wait(self, worker: _Worker) -> bool:
        """Wait until there may be a task; false if the thread should end. Surplus idle threads retire."""
        with self._lock:
            if self._stopped:
                self._retire(worker)
                return False
            if self._backlog:
                return True
            self._idle.append(worker)
        while True:
            is_surplus = len(self._threads) > self._workers
            if worker.wake.acquire(timeout=_IDLE_SECONDS if is_surplus else -1.0):
                self._waking = False
                return True
            with self._lock:
                if worker in self._idle and len(self._threads) > self._workers:
                    self._idle.remove(worker)
                    self._retire(worker)
                    return False

    def _retire(self, worker: _Worker) -> None:
        """End the thread, with the lock held."""
        self._ended += worker.finished - worker.brought
        del self._threads[worker.thread]

    def _watch(self) -> None:
        """The monitor: sleeps until a task finds no thread, then ticks while there is a backlog."""
        while True:
            self._wake.acquire()
            progress = self._progress()
            refused = 0
            while not self._stopped:
                time.sleep(_TICK)
                with self._lock:
                    if not self._backlog:
                        self._is_starved = False
                        break
                    before, progress = progress, self._progress()
                if before != progress or self._grow():
                    continue
                refused += 1
                if refused == 1:
                    logger.warning("%d tasks wait, but the system gives no more threads", len(self._backlog))
                if refused >= _REFUSALS and not self._threads:
                    self._run_here()
            if self._stopped:
                return

    def _run_here(self) -> None:
        """Run a task on the monitor's thread, as the system gives no other."""
        this_thread.runs_callees = True
        try:
            function, argument = self._backlog.popleft()
        except IndexError:
            return
        try:
            if argument is COMPLETION:
                function(argument)
            else:
                Context().run(function, argument)
        except BaseException:
            logger.exception("an internal task failed")
        if modes_changed():
            reset_modes()
        with self._lock:
            self._ended += 1
        if not self._backlog and self._on_idle is not None:
            self._tell_if_idle(self._on_idle)

    def _progress(self) -> int:
        """A number that grows whenever a task is started or finished."""
        with self._lock:
            return self._submitted - len(self._backlog) + self._finished()

    def _grow(self) -> bool:
        """Double the threads above the base number, or beyond the ceiling add one once in a while; returns
        false if the system cannot start any.
        """
        grown = False
        threads = len(self._threads)
        wanted = min(max(1, threads - self._workers), self._ceiling - threads)
        if wanted <= 0:
            if self._ticks_beyond == 0:
                text = (
                    "%d threads are blocked, %d tasks wait: threads are added slowly now (max_worker_threads)"
                )
                logger.warning(text, threads, len(self._backlog))
            self._ticks_beyond += 1
            if self._ticks_beyond % _TICKS_BEYOND_CEILING:
                return True
            wanted = 1
        for _ in range(wanted):
            with self._lock:
                fresh = None if self._stopped else self._new_thread()
            if fresh is None or not self._start(fresh):
                break
            grown = True
        return grown


def complete_futures(dropped: Sequence[Task]) -> None:
    """Run those of the dropped tasks that complete futures."""
    with contextlib.ExitStack() as all_of_them:  # even if the callbacks of one raise
        for function, argument in reversed(dropped):
            if isinstance(getattr(function, "__self__", None), torch.futures.Future):
                all_of_them.callback(function, argument)


@interruptible
def _join(thread: threading.Thread, timeout: float | None) -> None:
    try:
        thread.join(timeout)
    except RuntimeError as error:  # it has not begun, and will end at once
        if is_interruption(error):
            raise

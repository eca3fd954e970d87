"""Threads of simulated workers that may wait: each runs only while the clock lets it, one at a time.

The thread that starts or resumes another pauses until that one waits or ends, so a seed still determines
the run. What a thread waits for is looked at after each step of its worker, and it goes on a moment later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

from dist_autograd import backwards
from rpc.runtime import blocking
from rpc.runtime.blocking import INFINITE
from rpc.transport.inline_read import Awaited
from tests.simulation.clock import WorkerLoop

__all__ = ["Threads"]

_LONGEST: Final = 0.001
"""Maximum time in seconds until a thread that may go on does."""


class _EndedError(BaseException):
    """The run is over, or the thread's worker has died."""


class _Thread:
    def __init__(self, threads: Threads, loop: WorkerLoop, run: Callable[[], object]) -> None:
        self.loop = loop
        self.ready: Callable[[], bool] | None = None
        self.is_over = False
        self.has_ended = False
        self._threads = threads
        self._run = run
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, daemon=True)

    def begin(self) -> None:
        self._thread.start()
        self._back.acquire()

    def resume(self) -> None:
        self._go.release()
        self._back.acquire()

    def end(self) -> None:
        self.is_over = True
        self.resume()
        self._thread.join()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait; on this thread."""
        if not self.is_over:
            self.ready = ready
            self._back.release()
            self._go.acquire()
        if self.is_over:
            raise _EndedError

    def _main(self) -> None:
        self._threads.here.thread = self
        try:
            self._run()
        except _EndedError:
            pass
        finally:
            self.has_ended = True
            self._back.release()


class _Here(threading.local):
    thread: _Thread | None = None


class Threads:
    """The threads of a run.

    Attributes:
        here: knows which of them the current thread is.
        waiting: those that wait, and are not about to go on.
    """

    def __init__(self) -> None:
        self.here = _Here()
        self.waiting: dict[_Thread, None] = {}
        self._all: list[_Thread] = []

    def start(self, loop: WorkerLoop, run: Callable[[], object]) -> None:
        """Run something that may wait on a thread of the worker with this loop; in a step of that loop."""
        thread = _Thread(self, loop, run)
        self._all.append(thread)
        thread.begin()

    def wait(self, ready: Callable[[], bool], deadline: float = INFINITE) -> bool:
        """Wait, on one of these threads; returns whether it was ready before the deadline."""
        thread = self.here.thread
        assert thread is not None, "a simulated worker cannot wait here"
        loop = thread.loop
        if not ready():
            if deadline < INFINITE:
                loop.call_at(deadline, lambda: None)  # a step, after which it is looked at
            self.waiting[thread] = None
            thread.wait(lambda: ready() or loop.time() >= deadline)
        return ready()

    def look(self, loop: WorkerLoop) -> None:
        """Have the threads of a worker that may go on do so soon; after each of its steps."""
        for thread in [each for each in self.waiting if each.loop is loop]:
            if thread.ready is not None and thread.ready():
                del self.waiting[thread]
                loop.call_later(loop.clock.chance.random() * _LONGEST, thread.resume)

    def end(self) -> None:
        """End all that still wait."""
        for thread in self._all:
            if not thread.has_ended:
                thread.end()

    @contextmanager
    def ruling(self, current: Callable[[], WorkerLoop]) -> Iterator[None]:
        """Have whoever waits in the packages wait here, meanwhile.

        Args:
            current: returns the loop on which something happens now.
        """

        def sleep(awaited: Awaited, deadline: float) -> bool:
            return self.wait(awaited.done, deadline)

        def wait_for_event(event: blocking.Event) -> bool:
            return self.wait(event.is_set)

        def executor(*_: object) -> _Executor:
            return _Executor(self, current())

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(Awaited, "sleep", sleep))
            stack.enter_context(mock.patch.object(blocking, "wait_for_event", wait_for_event))
            stack.enter_context(mock.patch.object(backwards, "Executor", executor))
            yield


class _Executor:
    """Runs each task on a thread of its own, a moment after it was submitted."""

    def __init__(self, threads: Threads, loop: WorkerLoop) -> None:
        self._threads = threads
        self._loop = loop

    def submit_at_once(self, task: tuple[Callable[[Any], object], Any]) -> None:
        function, argument = task
        loop = self._loop
        delay = loop.clock.chance.random() * _LONGEST
        loop.call_later(delay, lambda: self._threads.start(loop, lambda: function(argument)))

    def stop(self, timeout: float | None = None) -> bool:
        return True

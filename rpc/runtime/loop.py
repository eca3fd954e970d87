"""A daemon thread that runs an asyncio loop: uvloop's if it is installed, otherwise the standard one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import logging
import threading
from _thread import allocate_lock
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, TypeVar

from rpc.errors import BlockingCallError
from rpc.runtime.blocking import INFINITE, this_thread, wait_for
from rpc.runtime.interrupts import interruptible, protected

logger = logging.getLogger(__name__)

T = TypeVar("T")


def new_loop() -> asyncio.AbstractEventLoop:
    """Make a loop: uvloop's if it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def keep_running(loop: asyncio.AbstractEventLoop, is_over: Callable[[], bool]) -> None:
    """Run a loop until it is stopped and ``is_over()`` is true.

    If a task or callback raises ``SystemExit`` or ``KeyboardInterrupt``, asyncio ends the loop. But the error
    only concerns that task, and others still need the loop: so it is logged, and the loop goes on.
    """
    while not is_over():
        try:
            loop.run_forever()
        except (KeyboardInterrupt, SystemExit) as error:
            name, kind = threading.current_thread().name, type(error).__name__
            logger.exception("a task or callback on the thread %s raised %s; its loop goes on", name, kind)


class LoopThread:
    """Runs a loop until stopped. Methods may be called from any other thread.

    Args:
        name: the thread's name.
        no_blocking: the text of ``BlockingCallError`` for code on this thread that makes a blocking call.
    """

    def __init__(self, name: str, no_blocking: str) -> None:
        self.loop = new_loop()
        self._no_blocking = no_blocking
        self._stopping = False
        self._last_task: asyncio.Task[None] | None = None
        self._waited_for: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        this_thread.must_not_block = self._no_blocking
        this_thread.runs_callees = True
        asyncio.set_event_loop(self.loop)
        try:
            keep_running(self.loop, lambda: self._stopping)
        finally:
            self.loop.close()
            for future in list(self._waited_for):
                future.cancel()

    def is_current(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.current_thread() is self._thread

    def call(self, function: Callable[..., T], *args: object) -> T:
        """Run a function on the loop's thread and return its result, or raise its error."""

        async def run() -> T:
            return function(*args)

        return self.wait_for(run())

    @protected
    def wait_for(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            TimeoutError: it took more than ``timeout`` seconds; it is cancelled.
            BlockingCallError: the calling thread is this loop's.
            RuntimeError: the loop has ended before the coroutine.
        """
        if self.is_current():
            coroutine.close()
            raise BlockingCallError(self._no_blocking)
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:
            coroutine.close()
            raise
        self._waited_for.add(future)
        try:
            if self.loop.is_closed():
                future.cancel()
            return _result(future, timeout)
        except concurrent.futures.CancelledError:
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()
            raise RuntimeError(f"the thread {self._thread.name} has ended") from None
        except BaseException:
            future.cancel()
            raise
        finally:
            self._waited_for.discard(future)

    @protected
    def stop(self, timeout: float = 5.0) -> bool:
        """Cancel all tasks on the loop, end the thread, and return whether it has ended."""
        if not self._thread.is_alive():
            return True

        with contextlib.suppress(RuntimeError):  # it has just ended
            self.loop.call_soon_threadsafe(self._begin_to_stop, timeout)
        if not self.is_current():
            _join(self._thread, timeout)
        return not self._thread.is_alive()

    def _begin_to_stop(self, timeout: float) -> None:
        if self._last_task is None:
            self._last_task = self.loop.create_task(self._wind_up(timeout / 2))

    async def _wind_up(self, patience: float) -> None:
        try:
            others = asyncio.all_tasks() - {self._last_task}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=patience)
            await self.loop.shutdown_asyncgens()
        finally:
            self._stopping = True
            self.loop.stop()


def _result(future: concurrent.futures.Future[T], timeout: float | None) -> T:
    done = allocate_lock()
    done.acquire()
    future.add_done_callback(lambda _: done.release())
    wait_for(done, INFINITE if timeout is None else monotonic() + timeout)
    return future.result(0)


@interruptible
def _join(thread: threading.Thread, timeout: float) -> None:
    thread.join(timeout)

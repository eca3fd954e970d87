"""Slots: limit how many calls run at once, on the loop or in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from types import TracebackType
from typing import Any

from farcall.serving.errors import answerable
from rpc.runtime.isolation import IsolatingThreadPool

__all__ = ["Slots"]


class Slots:
    """Slots for calls. ``async with slots`` for coroutines on the loop, ``in_thread`` for functions.

    Args:
        count: number of slots.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = asyncio.Semaphore(count)
        self._loop = asyncio.get_running_loop()
        self._executor = IsolatingThreadPool(count, thread_name_prefix="farcall serving")
        self._executor.submit(int)  # one thread at least, in case that no other can be started later
        self._in_threads = 0
        self._closed = False
        self._told: list[Callable[[], None]] = []

    @property
    def in_threads(self) -> int:
        """Number of calls that run in threads, including those whose callers are gone."""
        return self._in_threads

    def when_free(self, tell: Callable[[], None]) -> None:
        """Call back, once, as soon as there may be a free slot: now, or when a call ends."""
        if self._free.locked():
            self._told.append(tell)
        else:
            tell()

    async def _acquire(self) -> None:
        try:
            await self._free.acquire()
        except asyncio.CancelledError:
            self._tell()  # it may have had a slot already
            raise

    def _release(self) -> None:
        self._tell()
        self._free.release()

    def _tell(self) -> None:
        told, self._told = self._told, []
        for tell in told:
            tell()

    async def __aenter__(self) -> None:
        await self._acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    async def in_thread(
        self,
        call: Callable[..., Any],
        *args: Any,
        abandoned: Callable[[], object] | None = None,
        executor: Executor | None = None,
    ) -> Any:
        """Return the result of a function that may block.

        A thread cannot be cancelled: if the caller is, the call keeps its slot until it has ended, and
        ``abandoned``, which is called then; at once if the call has not begun.

        Args:
            executor: runs it; default: the threads that all calls share.
        """
        executor = self._executor if executor is None else executor
        try:
            await self._acquire()
        except asyncio.CancelledError:
            if abandoned is not None and not self._closed:
                executor.submit(abandoned)
            raise
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._in_threads += 1
        executor.submit(self._run, executor, answer, abandoned, call, *args)
        try:
            return await answer
        except asyncio.CancelledError:
            had_ended = answer.done() and not answer.cancelled()  # just then; else ``_ended`` sees to it
            if had_ended and abandoned is not None and not self._closed:
                executor.submit(abandoned)
            raise

    def _run(
        self,
        executor: Executor,
        answer: asyncio.Future[Any],
        abandoned: Callable[[], object] | None,
        call: Callable[..., Any],
        *args: Any,
    ) -> None:
        result, error = _outcome(call, args)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ended, executor, answer, abandoned, result, error)

    def _ended(
        self,
        executor: Executor,
        answer: asyncio.Future[Any],
        abandoned: Callable[[], object] | None,
        result: Any,
        error: Exception | None,
    ) -> None:
        if answer.cancelled() and abandoned is not None and not self._closed:
            executor.submit(self._run, executor, answer, None, abandoned)
            return
        self._in_threads -= 1
        self._release()
        if not answer.done():
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)

    def close(self) -> None:
        """End the threads; those that run a call are not waited for."""
        self._closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)


def _outcome(call: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    """Return the outcome of a call; a separate function, so that no frame of the error's traceback holds the
    error.
    """
    try:
        return call(*args), None
    except BaseException as error:  # returned to the caller, whatever it is
        return None, answerable(error)

"""Where calls run: so many at once, on the loop or in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from farcall.serving.errors import contained

__all__ = ["Slots"]


class Slots:
    """Places for calls. As ``async with slots`` for what runs on the loop, ``in_thread`` for what does not.

    Args:
        count: of places.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = asyncio.Semaphore(count)
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="farcall serving")
        self._in_threads = 0

    @property
    def in_threads(self) -> int:
        """Calls that run in threads, also those for which nobody waits any more."""
        return self._in_threads

    async def __aenter__(self) -> None:
        await self._free.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._free.release()

    async def in_thread(
        self, call: Callable[..., Any], *args: Any, abandoned: Callable[[], object] | None = None
    ) -> Any:
        """The result of a function that may block.

        A thread cannot be cancelled: if who waits is, the call keeps its place until it has ended, and
        ``abandoned`` is called in that thread.
        """
        await self._free.acquire()
        running = self._executor.submit(_contained, call, *args)
        self._in_threads += 1
        running.add_done_callback(self._ended)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if abandoned is not None:
                running.add_done_callback(lambda _: abandoned())
            raise

    def _ended(self, _: Future[Any]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        self._in_threads -= 1
        self._free.release()

    def close(self) -> None:
        """Let threads end; those that run a call are not waited for."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _contained(call: Callable[..., Any], *args: Any) -> Any:
    with contained():
        return call(*args)

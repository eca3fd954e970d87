"""Iterators over values that come from other workers, for ``for`` and for ``async for``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

__all__ = ["ClosingIterator", "waiter"]


class ClosingIterator:
    """An iterator, also an asynchronous one, that the end of a ``with`` statement closes."""

    def close(self) -> None:
        """End the iteration. Does not wait."""
        raise NotImplementedError

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def waiter() -> tuple[asyncio.Future[None], Callable[..., None]]:
    """Return a future of the running loop, and a function that completes it: from any thread, with any
    arguments, and after the loop has ended.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def complete() -> None:
        if not future.done():
            future.set_result(None)

    def wake(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # that loop has ended: nothing waits any more
            loop.call_soon_threadsafe(complete)

    return future, wake

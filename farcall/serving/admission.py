"""Admission: limits the number of calls of a server, and of each caller."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from farcall.serving.errors import Refused

__all__ = ["Admission", "Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server. Calls beyond them are refused at once, with ``RESOURCE_EXHAUSTED``.

    Args:
        in_flight: maximum number of calls, or batches of calls, that run at once.
        queue: maximum number of calls that wait to run, or for others of their batch.
        per_caller: maximum number of one caller's calls that run or wait; default: no limit per caller.
        message_bytes: maximum size in bytes of one request, and of the memory that its values take when it is
            read.
        compressed: whether to accept compressed requests. One of 300 KB can fill ``message_bytes`` of memory
            before any of it can be checked.
    """

    in_flight: int = 16
    queue: int = 256
    per_caller: int | None = None
    message_bytes: int = 256 << 20
    compressed: bool = False

    def __post_init__(self) -> None:
        if self.in_flight < 1 or self.queue < 0 or self.message_bytes < 1024:
            raise ValueError("in_flight is at least 1, queue at least 0 and message_bytes at least 1024")
        if self.per_caller is not None and self.per_caller < 1:
            raise ValueError("per_caller is at least 1")


class Admission:
    """Counts the calls that a server has accepted and not answered."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._callers: Counter[str] = Counter()
        self.draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def admitted(self) -> int:
        """Number of calls that run or wait."""
        return self._callers.total()

    def check_together(self, count: int) -> None:
        """Check the number of calls in one message, before they are read.

        Raises:
            Refused: they are too many, even if there were no others.
        """
        most = self._limits.in_flight + self._limits.queue
        if count > most:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{count} calls in one message; this server takes {most} at once, so send fewer in each",
            )

    async def empty(self) -> None:
        """Wait until no call runs or waits."""
        await self._empty.wait()

    @contextmanager
    def admit(self, caller: str) -> Iterator[None]:
        """Accept a call, for as long as the context lasts.

        Raises:
            Refused: there are too many, or the server is about to end.
        """
        limits = self._limits
        if self.draining:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the server is about to end and takes no more calls")
        if self.admitted >= limits.in_flight + limits.queue:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self.admitted} calls run or wait, all that this server takes at once; try again later",
            )
        if limits.per_caller is not None and self._callers[caller] >= limits.per_caller:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{limits.per_caller} calls of {caller} run or wait, all that a caller may have at once",
            )
        self._callers[caller] += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller]
            if not self._callers:
                self._empty.set()

"""Simulated time: one queue of what is to happen, and a loop for each worker on it.

Nothing happens but what is in the queue, in the order of its time, and of its entry where times are equal. So
a run is decided by the chance that its parts draw from ``Clock.chance``, and by nothing else.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import secrets
from asyncio import events as asyncio_events
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context
from random import Random
from typing import Any, Final
from unittest import mock

from dist_autograd import recording
from rpc.agent import calls, departure
from rpc.group import peer
from rpc.runtime import limited_log, notices

__all__ = ["Clock", "Handle", "WorkerLoop"]

_READERS: Final = (calls, departure, peer, limited_log, notices)
"""The modules that read the clock by themselves; all else asks its loop."""

_BEGIN: Final = 1000.0


class Handle:
    """Something that is to happen, unless it is cancelled."""

    __slots__ = ("arguments", "callback", "cancelled_", "context", "loop", "time")

    def __init__(
        self,
        time: float,
        loop: WorkerLoop,
        callback: Callable[..., object],
        arguments: tuple[Any, ...],
        context: Context | None,
    ) -> None:
        self.time = time
        self.loop = loop
        self.callback = callback
        self.arguments = arguments
        self.context = context
        self.cancelled_ = False

    def cancel(self) -> None:
        self.cancelled_ = True

    def cancelled(self) -> bool:
        return self.cancelled_

    def when(self) -> float:
        return self.time


class Clock:
    """The queue. ``seed`` decides everything.

    Attributes:
        now: seconds.
        happened: how much has.
        enter: called with a worker's loop before something happens there; ``after`` when it has.
    """

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.now = _BEGIN
        self.happened = 0
        self.enter: Callable[[WorkerLoop], object] = lambda _: None
        self.after: Callable[[Handle], object] = lambda _: None
        self._entered = 0
        self._queue: list[tuple[float, int, Handle]] = []

    @property
    def passed(self) -> float:
        """Seconds since the beginning."""
        return self.now - _BEGIN

    def add(self, handle: Handle) -> Handle:
        """Have something happen at its time."""
        self._entered += 1
        heapq.heappush(self._queue, (handle.time, self._entered, handle))
        return handle

    def run(self, seconds: float) -> None:
        """Let all happen that does within so many seconds."""
        end = self.now + seconds
        queue = self._queue
        while queue and queue[0][0] <= end:
            time, _, handle = heapq.heappop(queue)
            loop = handle.loop
            if handle.cancelled_ or loop.dead:
                continue
            self.now = time
            if time < loop.paused_until:
                handle.time = loop.paused_until
                self.add(handle)  # behind what was deferred before it
                continue
            self.happened += 1
            self.enter(loop)
            asyncio_events._set_running_loop(loop)
            if handle.context is None:
                handle.callback(*handle.arguments)
            else:
                handle.context.run(handle.callback, *handle.arguments)
            self.after(handle)
        self.now = end

    @contextmanager
    def ruling(self) -> Iterator[None]:
        """Meanwhile, this is the time for whoever asks."""
        with ExitStack() as stack:
            for module in _READERS:
                stack.enter_context(mock.patch.object(module, "monotonic", self._read))
            # What distributed autograd numbers, and the order of workers in a set.
            stack.enter_context(mock.patch.object(secrets, "randbits", self.chance.getrandbits))
            stack.enter_context(mock.patch.object(recording, "clock", itertools.count(1)))
            stack.enter_context(mock.patch.object(peer.Peer, "__hash__", lambda one: hash(one.incarnation)))
            stack.callback(asyncio_events._set_running_loop, None)
            yield

    def _read(self) -> float:
        return self.now


class WorkerLoop(asyncio.AbstractEventLoop):
    """As much of a loop as agents need. A process that is stopped has what happens to it when it goes on.

    Attributes:
        place: where it is.
        dead: its process has ended.
        paused_until: its process is stopped until then.
    """

    def __init__(self, clock: Clock, place: str) -> None:
        self.clock = clock
        self.place = place
        self.dead = False
        self.paused_until = 0.0

    def __repr__(self) -> str:
        return f"<loop of {self.place}>"

    def time(self) -> float:
        return self.clock.now

    def call_at(  # type: ignore[override]  # a handle of ours
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        return self.clock.add(Handle(max(when, self.clock.now), self, callback, args, context))

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        return self.call_at(self.clock.now + delay, callback, *args, context=context)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        return self.call_at(self.clock.now, callback, *args, context=context)

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **_: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.dead:
            return
        error = context.get("exception")
        raise AssertionError(f"{self.place}: {context['message']}") from error

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.dead

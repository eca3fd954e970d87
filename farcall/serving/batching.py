"""Batching: calls that arrive together are run as one.

A batch is open for calls of one kind: the same structure, dtypes and sizes, except for the first dimension.
It is closed when it is full, or when its first call has waited long enough and there is a slot for it to run:
until then, it may as well accept more. A batch that fails is run again call by call, so that an error is
returned only to the call that causes it. A run whose callers have all gone is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from farcall.serving.endpoint import Batching
from spmd.workers.joined_calls import JoinableCall, join, split

__all__ = ["Batcher"]

WhenFree = Callable[[Callable[[], None]], None]
Run = Callable[[Sequence[Any], Mapping[str, Any]], Awaitable[Any]]


@dataclass(slots=True)
class _Call:
    given: JoinableCall
    answer: asyncio.Future[Any]
    run: _Run | None = None


@dataclass(slots=True)
class _Batch:
    calls: list[_Call] = field(default_factory=list)
    rows: int = 0
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _Run:
    """The run of one or several calls."""

    calls: list[_Call]
    task: asyncio.Task[None]

    def cancel_unless_awaited(self) -> None:
        if all(call.answer.done() for call in self.calls):
            self.task.cancel()


class Batcher:
    """Joins the calls of one endpoint.

    Args:
        batching: batch size and delay.
        run: makes one call.
        observe: called with the number of calls in each batch.
        when_free: calls back as soon as there is a free slot.
    """

    def __init__(
        self, batching: Batching, run: Run, observe: Callable[[int], None], when_free: WhenFree
    ) -> None:
        self._batching = batching
        self._run = run
        self._observe = observe
        self._when_free = when_free
        self._open: dict[Hashable, _Batch] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of one call, as from ``run``."""
        given = JoinableCall.of(args, kwargs)
        if given is None or given.rows > self._batching.max_batch_size:
            self._observe(1)
            return await self._run(args, kwargs)
        call = _Call(given, asyncio.get_running_loop().create_future())
        self._add(call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            if call.run is not None:
                call.run.cancel_unless_awaited()
            raise

    def _add(self, call: _Call) -> None:
        kind, rows = call.given.kind, call.given.rows
        batch = self._open.get(kind)
        if batch is not None and batch.rows + rows > self._batching.max_batch_size:
            self._close(kind)
            batch = None
        if batch is None:
            batch = self._open[kind] = _Batch()
            loop = asyncio.get_running_loop()
            close = partial(self._close_if_open, kind, batch)
            batch.timer = loop.call_later(self._batching.max_delay, self._when_free, close)
        batch.calls.append(call)
        batch.rows += rows
        if batch.rows == self._batching.max_batch_size:
            self._close(kind)

    def _close_if_open(self, kind: Hashable, batch: _Batch) -> None:
        if self._open.get(kind) is batch:
            self._close(kind)

    def _close(self, kind: Hashable) -> None:
        batch = self._open.pop(kind)
        assert batch.timer is not None
        batch.timer.cancel()
        self._begin(batch.calls)

    def _begin(self, calls: list[_Call]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._answer(calls))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        run = _Run(calls, task)
        for call in calls:
            call.run = run
        return task

    async def _answer(self, calls: list[_Call]) -> None:
        calls = [call for call in calls if not call.answer.done()]
        if not calls:
            return
        self._observe(len(calls))
        try:
            args, kwargs = join([call.given for call in calls])
            results = split(await self._run(args, kwargs), [call.given.rows for call in calls])
        except Exception as error:
            if len(calls) == 1:
                _settle(calls[0], error=error)
            else:
                for call in calls:
                    await asyncio.wait([self._begin([call])])
            return
        for call, result in zip(calls, results, strict=True):
            _settle(call, result)


def _settle(call: _Call, result: Any = None, error: Exception | None = None) -> None:
    if call.answer.done():
        return
    if error is not None:
        call.answer.set_exception(error)
    else:
        call.answer.set_result(result)

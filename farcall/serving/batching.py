"""Calls that come together are run as one.

A batch is open for calls of one kind: the same structure, dtypes and sizes beside the first. It is closed
when it is full, or its first call has waited long enough and there is a place for it to run: until then, it
can as well take more. A batch that fails is run again call by call, so that what is wrong with one is that
one's error. A run for which nobody waits any more is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farcall.serving.endpoint import Batching
from rpc.runtime.torch_internals import pytree

__all__ = ["Batcher"]

WhenFree = Callable[[Callable[[], None]], None]
Run = Callable[[Sequence[Any], Mapping[str, Any]], Awaitable[Any]]


@dataclass(slots=True)
class _Call:
    tensors: list[Tensor]
    rows: int
    answer: asyncio.Future[Any]
    run: _Run | None = None


@dataclass(slots=True)
class _Batch:
    structure: pytree.TreeSpec
    calls: list[_Call] = field(default_factory=list)
    rows: int = 0
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _Run:
    """What runs for some calls."""

    calls: list[_Call]
    task: asyncio.Task[None]

    def cancel_unless_awaited(self) -> None:
        if all(call.answer.done() for call in self.calls):
            self.task.cancel()


class Batcher:
    """Joins the calls of one endpoint.

    Args:
        batching: how many, and how long they wait.
        run: makes one call.
        observe: told how many calls a batch has.
        when_free: calls back as soon as there is a place to run.
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
        """The result of one call; as from ``run``."""
        leaves, structure = pytree.tree_flatten((list(args), dict(kwargs)))
        rows = _rows(leaves)
        if rows is None or rows > self._batching.max_batch_size:
            self._observe(1)
            return await self._run(args, kwargs)
        call = _Call(leaves, rows, asyncio.get_running_loop().create_future())
        self._add(call, structure)
        try:
            return await call.answer
        except asyncio.CancelledError:
            if call.run is not None:
                call.run.cancel_unless_awaited()
            raise

    def _add(self, call: _Call, structure: pytree.TreeSpec) -> None:
        kind = (structure, tuple((tensor.dtype, tensor.shape[1:]) for tensor in call.tensors))
        batch = self._open.get(kind)
        if batch is not None and batch.rows + call.rows > self._batching.max_batch_size:
            self._close(kind)
            batch = None
        if batch is None:
            batch = self._open[kind] = _Batch(structure)
            loop = asyncio.get_running_loop()
            close = partial(self._close_if_open, kind, batch)
            batch.timer = loop.call_later(self._batching.max_delay, self._when_free, close)
        batch.calls.append(call)
        batch.rows += call.rows
        if batch.rows == self._batching.max_batch_size:
            self._close(kind)

    def _close_if_open(self, kind: Hashable, batch: _Batch) -> None:
        if self._open.get(kind) is batch:
            self._close(kind)

    def _close(self, kind: Hashable) -> None:
        batch = self._open.pop(kind)
        assert batch.timer is not None
        batch.timer.cancel()
        self._begin(batch.calls, batch.structure)

    def _begin(self, calls: list[_Call], structure: pytree.TreeSpec) -> asyncio.Task[None]:
        task = asyncio.create_task(self._answer(calls, structure))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        run = _Run(calls, task)
        for call in calls:
            call.run = run
        return task

    async def _answer(self, calls: list[_Call], structure: pytree.TreeSpec) -> None:
        calls = [call for call in calls if not call.answer.done()]
        if not calls:
            return
        self._observe(len(calls))
        try:
            results = _split(await self._run(*_joined(calls, structure)), [call.rows for call in calls])
        except Exception as error:
            if len(calls) == 1:
                _settle(calls[0], error=error)
            else:
                for call in calls:
                    await asyncio.wait([self._begin([call], structure)])
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


def _rows(leaves: list[Any]) -> int | None:
    """How many rows all tensors have; None if they do not agree, or if not all are tensors."""
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return None
    found = {leaf.shape[0] for leaf in leaves}
    return found.pop() if len(found) == 1 else None


def _joined(calls: list[_Call], structure: pytree.TreeSpec) -> tuple[list[Any], dict[str, Any]]:
    joined = [torch.cat(parts) for parts in zip(*(call.tensors for call in calls), strict=True)]
    args, kwargs = pytree.tree_unflatten(joined, structure)
    return args, kwargs


def _split(result: Any, rows: list[int]) -> list[Any]:
    """The parts of a joined result.

    Raises:
        TypeError: it is not made of tensors with as many rows.
    """
    leaves, structure = pytree.tree_flatten(result)
    if _rows(leaves) != sum(rows):
        raise TypeError(
            f"a batched function must return tensors with as many rows as it is given, {sum(rows)} here"
        )
    parts = [leaf.split(rows) for leaf in leaves]
    return [pytree.tree_unflatten(list(part), structure) for part in zip(*parts, strict=True)]

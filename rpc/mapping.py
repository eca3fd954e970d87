"""``map``: call a function with each of many items, on several workers.

Items are read on the thread that iterates over the results, and wait in a queue. A worker that has finished
an item gets the next one at once, from the thread that completes its call. At most ``look_ahead`` items are
read whose results have not been taken, so memory is bounded, however long the iterable is.
"""

# ruff: noqa: A001  # the public name

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextvars import copy_context
from functools import partial
from typing import Any, Final, Generic, TypeVar, overload

import torch

from rpc.agent.agent import Agent
from rpc.agent.futures import Future
from rpc.agent.interface import AgentInterface
from rpc.api import not_callable
from rpc.errors import WorkerLostError, with_article
from rpc.group.membership import WorkerReference
from rpc.group.workers import WorkerInfo
from rpc.options import UNSET_TIMEOUT
from rpc.retrying import check_retries, limit_of, loss_of, returns_of, why_gone
from rpc.runtime import waits
from rpc.runtime.blocking import Event, check_may_block, wait_for_event
from rpc.runtime.current import current_agent
from rpc.runtime.interrupts import interruptible, is_interruption, protected
from rpc.runtime.iterating import ClosingIterator, waiter
from rpc.runtime.legible import legible

__all__ = ["MapResults", "map"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741  # an item

_LOOK_AHEAD: Final = 4
"""Default number of items that are read for each that can be computed at the same time."""


class _Worker:
    """One of the workers.

    Attributes:
        busy: number of items that it computes now.
        reason: why it is gone; None while it is there.
        awaited: whether items wait for it to come back.
    """

    __slots__ = ("awaited", "busy", "name", "reason")

    def __init__(self, name: str) -> None:
        self.name = name
        self.busy = 0
        self.reason: str | None = None
        self.awaited = False


class _Item:
    """An item, its index, and how often it may still be given to another worker."""

    __slots__ = ("future", "index", "left", "value")

    def __init__(self, index: int, value: Any, left: int) -> None:
        self.index = index
        self.value = value
        self.left = left
        self.future: Future[Any] | None = None


class _Outcome:
    """The outcome of an item: a completed future, or an error. ``place`` is a note for its error."""

    __slots__ = ("_error", "_future", "_place")

    def __init__(
        self, place: str, future: Future[Any] | None = None, error: BaseException | None = None
    ) -> None:
        self._place = place
        self._future = future
        self._error = error

    def value(self) -> Any:
        try:
            if self._future is not None:
                return self._future.value()  # here, since it makes tensors on devices ready for this thread
            assert self._error is not None
            raise self._error
        except (StopIteration, StopAsyncIteration) as error:  # it would end the iteration
            raise RuntimeError(f"{self._place} raised {type(error).__name__}") from error
        except Exception as error:
            error.add_note(self._place)
            raise
        finally:
            self._future = self._error = None


class _Work:
    """The items of one ``map``, and the workers that compute them. From any thread.

    Attributes:
        changed: set when there is another outcome.
        wake: if it is set, called when ``changed`` is set.
    """

    def __init__(
        self,
        agent: AgentInterface,
        function: Callable[..., Any],
        workers: Iterable[str],
        concurrency: int,
        timeout: float,
        retries: int,
        ordered: bool,
    ) -> None:
        self.changed = Event()
        self.wake: Callable[[], object] | None = None
        self._agent = agent
        self._function = function
        self._workers = [_Worker(name) for name in workers]
        self._concurrency = concurrency
        self._timeout = timeout
        self._retries = retries
        self._ordered = ordered
        self._records_gradients = torch.is_grad_enabled()
        self._context = copy_context()
        self._lock = threading.RLock()  # reentrant: a finalizer may close another map
        self._thread = threading.local()
        self._queue: deque[_Item] = deque()
        self._under_way: dict[_Item, _Worker] = {}
        self._done: dict[int, _Outcome] = {}
        self._given = 0
        self._forget: dict[_Worker, Callable[[], None]] = {}
        self._closed = False

    def add(self, index: int, value: Any) -> None:
        """Have an item computed."""
        self._queue.append(_Item(index, value, self._retries))
        self.send()

    @protected
    def take(self) -> _Outcome | None:
        """Take the next outcome, if it is there."""
        self.changed.clear()
        with self._lock:
            outcome = self._done.pop(self._given if self._ordered else next(iter(self._done), -1), None)
            self._given += outcome is not None
            return outcome

    @protected
    def finish(self, index: int, outcome: _Outcome) -> None:
        """Set the outcome of an item."""
        with self._lock:
            if not self._closed:
                self._done[index] = outcome
        self.changed.set()
        wake = self.wake
        if wake is not None:
            wake()

    def awaited(self) -> list[str]:
        """Return the names of the workers that compute items now; if there are none, those of all."""
        with self._lock:
            return sorted({worker.name for worker in self._under_way.values()}) or [
                worker.name for worker in self._workers
            ]

    @protected
    def close(self) -> None:
        """Cancel what is under way, and drop the rest."""
        for end in self._ending():
            end()

    @protected
    def _ending(self) -> list[Callable[[], object]]:
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._done.clear()
            ends: list[Callable[[], object]] = list(self._forget.values())
            ends += [item.future.cancel for item in self._under_way if item.future is not None]
            return ends

    # ---- giving items to workers

    @protected
    def send(self) -> None:
        """Send waiting items to the workers that are free. If a signal handler interrupts it, the item that
        it was sending waits again.
        """
        if getattr(self._thread, "sends", False):  # a call has ended at once: the loop below goes on
            return
        self._thread.sends = True
        try:
            while (pair := self._next()) is not None:
                self._send(*pair)
        finally:
            self._thread.sends = False
        for item, error in self._impossible():
            self.finish(item.index, _Outcome(f"rpc.map: item {item.index}", error=error))

    @protected
    def _next(self) -> tuple[_Item, _Worker] | None:
        """Take the next waiting item and the worker that computes the fewest, if one is free."""
        with self._lock:
            free = [each for each in self._workers if each.reason is None and each.busy < self._concurrency]
            if not free or not self._queue:
                return None
            worker = min(free, key=lambda each: each.busy)
            worker.busy += 1
            item = self._queue.popleft()
            self._under_way[item] = worker
            return item, worker

    @protected
    def _impossible(self) -> list[tuple[_Item, WorkerLostError]]:
        """Take the waiting items if no worker is left, and none is awaited; each with its error."""
        with self._lock:
            if any(each.reason is None or each.awaited for each in self._workers):
                return []
            items = list(self._queue)
            self._queue.clear()
            last = self._workers[-1]
            names = ", ".join(f"'{each.name}'" for each in self._workers)
        text = f"no worker is left for it, of {names}; worker '{last.name}' is gone: {last.reason}"
        return [(item, WorkerLostError(text, last.name, last.reason or "")) for item in items]

    def _send(self, item: _Item, worker: _Worker) -> None:
        if self._is_gone(worker):
            self._ended(item, worker, again=True)
            return
        try:
            is_loss = loss_of(self._agent, worker.name)
            with torch.set_grad_enabled(self._records_gradients):
                future = self._agent.call_async(worker.name, self._function, (item.value,), {}, self._timeout)
        except BaseException as error:
            interrupts = is_interruption(error)
            self._ended(item, worker, again=interrupts)
            if interrupts:
                raise
            self.finish(item.index, _Outcome(f"rpc.map: item {item.index}", error=error))
            return
        if (pending := future._call) is not None:
            pending.how = "map"
        item.future = future
        answered = partial(self._answered, item, worker, is_loss)
        try:
            future.add_done_callback(answered)
        except BaseException:  # the call has ended at once, and a signal handler interrupted the callback
            if future.done() and item in self._under_way:
                answered(future)
            raise
        if self._closed:
            future.cancel()

    @protected
    def _answered(
        self, item: _Item, worker: _Worker, is_loss: Callable[[BaseException], bool], future: Future[Any]
    ) -> None:
        place = f"rpc.map: item {item.index}, on worker '{worker.name}'"
        again = False
        try:
            future.value()
        except Exception as error:
            if not self._closed and is_loss(error):
                self._is_gone(worker)
                again = item.left > 0
                item.left -= again
                if again:
                    logger.warning("%s: it is computed again: %s", place, legible(error))
                place += "" if self._retries else ". With retries=1, another worker would compute it"
        self._ended(item, worker, again=again)
        if not again:
            self.finish(item.index, _Outcome(place, future))
        self.send()

    @protected
    def _ended(self, item: _Item, worker: _Worker, *, again: bool = False) -> None:
        with self._lock:
            del self._under_way[item]
            item.future = None
            worker.busy -= 1
            if again and not self._closed:
                self._queue.appendleft(item)

    # ---- workers that are lost and come back

    @protected
    def _is_gone(self, worker: _Worker) -> bool:
        """Whether a worker is gone; if it is, and may come back, items wait for it."""
        reason = why_gone(self._agent, worker.name)
        if reason is None:
            return False
        may_return = returns_of(self._agent) is not None
        with self._lock:
            is_known = worker.reason is not None
            worker.reason = reason
            worker.awaited = worker.awaited if is_known else may_return
        if not is_known:
            self._use_when_back(worker)
        return True

    def _use_when_back(self, worker: _Worker) -> None:
        returns = returns_of(self._agent)
        if returns is None:  # in the meantime, this worker has left
            with self._lock:
                worker.awaited = False
            return

        def back(is_back: bool) -> None:
            self._context.copy().run(self._back, worker, is_back)

        forget = returns.when_back(worker.name, back, limit_of(self._agent, self._timeout))
        with self._lock:
            self._forget[worker] = forget
        if self._closed:
            forget()

    @protected
    def _back(self, worker: _Worker, is_back: bool) -> None:
        with self._lock:
            if self._closed:
                return
            worker.awaited = False
            if is_back:
                worker.reason = None
        if not is_back:  # it is used when it comes, but items do not wait for it any longer
            self._use_when_back(worker)
        self.send()


class MapResults(ClosingIterator, Generic[T]):
    """The results of ``rpc.map``: an iterator, for ``for`` and for ``async for``, of one thread or task.

    An item that fails raises its error in its place, with the item's index as a note; the iterator can be
    asked for the next result after that.
    """

    def __init__(
        self, work: _Work, items: Iterable[Any], look_ahead: int, drop: Callable[[_Work], object]
    ) -> None:
        self._work = work
        self._items = iter(items)
        self._look_ahead = look_ahead
        self._drop = drop
        self._read = 0
        self._given = 0
        self._exhausted = False

    def __next__(self) -> T:
        """Return the next result; waits until it is there."""
        check_may_block()
        while (found := self._next()) is None:
            if self._exhausted and self._given == self._read:
                raise StopIteration
            with waits.waiting("rpc.map", self._work.awaited):
                wait_for_event(self._work.changed)
        return found[0]

    async def __anext__(self) -> T:
        """Return the next result, in a coroutine on any asyncio loop."""
        while (found := self._next()) is None:
            if self._exhausted and self._given == self._read:
                raise StopAsyncIteration
            await self._changed()
        return found[0]

    @protected
    def close(self) -> None:
        """Cancel the items that are computed now, and end the iteration. Does not wait: a function that runs
        on a thread runs to its end, and its value is dropped.
        """
        self._exhausted = True
        self._given = self._read
        self._work.close()

    def __del__(self) -> None:
        if hasattr(self, "_given") and not (self._exhausted and self._given == self._read):
            self._drop(self._work)

    @protected  # between two items that are read
    def _next(self) -> tuple[T] | None:
        """Return the next result, if it is there; raises its error."""
        self._work.send()  # an item that an interruption has left waiting
        self._read_items()
        outcome = self._work.take()
        if outcome is None:
            return None
        self._given += 1
        return (outcome.value(),)

    def _read_items(self) -> None:
        while not self._exhausted and self._read - self._given < self._look_ahead:
            index = self._read
            try:
                item = _read(self._items)
            except Exception as error:
                if is_interruption(error):
                    raise
                self._exhausted = True
                self._read += 1
                self._work.finish(index, _Outcome(f"rpc.map: reading item {index}", error=error))
            else:
                self._exhausted = not item
                self._read += len(item)
                for value in item:
                    self._work.add(index, value)

    async def _changed(self) -> None:
        completed, self._work.wake = waiter()
        try:
            if not self._work.changed.is_set():
                await completed
        finally:
            self._work.wake = None


@interruptible  # it runs user code
def _read(items: Iterator[Any]) -> tuple[Any, ...]:
    """Return a tuple of the next item; an empty one at the end."""
    for item in items:  # no signal handler runs between this and the return, as one would after ``next()``
        return (item,)
    return ()


@overload
def map(
    function: Callable[[I], Coroutine[Any, Any, T]],
    items: Iterable[I],
    workers: Iterable[WorkerReference] | None = None,
    *,
    ordered: bool = True,
    concurrency: int = 1,
    look_ahead: int | None = None,
    timeout: float = UNSET_TIMEOUT,
    retries: int = 0,
) -> MapResults[T]: ...
@overload
def map(
    function: Callable[[I], torch.futures.Future[T]],
    items: Iterable[I],
    workers: Iterable[WorkerReference] | None = None,
    *,
    ordered: bool = True,
    concurrency: int = 1,
    look_ahead: int | None = None,
    timeout: float = UNSET_TIMEOUT,
    retries: int = 0,
) -> MapResults[T]: ...
@overload
def map(
    function: Callable[[I], T],
    items: Iterable[I],
    workers: Iterable[WorkerReference] | None = None,
    *,
    ordered: bool = True,
    concurrency: int = 1,
    look_ahead: int | None = None,
    timeout: float = UNSET_TIMEOUT,
    retries: int = 0,
) -> MapResults[T]: ...
def map(
    function: Callable[..., Any],
    items: Iterable[Any],
    workers: Iterable[WorkerReference] | None = None,
    *,
    ordered: bool = True,
    concurrency: int = 1,
    look_ahead: int | None = None,
    timeout: float = UNSET_TIMEOUT,
    retries: int = 0,
) -> MapResults[Any]:
    """Call ``function`` with each item, on several workers, and iterate over the results as they come.

    A worker gets its next item when it has finished one, so fast workers compute more of them. Items are read
    from ``items`` during the iteration, and only as far ahead as ``look_ahead`` allows: it may be a generator
    without an end.

    Args:
        function: called as ``function(item)``; anything that ``rpc_sync`` can call. For further arguments use
            ``functools.partial``.
        items: the items. They are read on the thread that iterates over the results, and must not be changed
            until their results are there.
        workers: names, ids or ``WorkerInfo`` of the workers. Default: all other workers that are in the group
            now; this one, if it is alone.
        ordered: whether results come in the order of the items; otherwise each comes as soon as it is there.
        concurrency: number of items that each worker computes at the same time, on threads of its own. A
            function whose item has timed out, or whose map was closed, may still be running beside them.
        look_ahead: maximum number of items that are read and whose results have not been taken yet. Default:
            4 times the number that can be computed at the same time.
        timeout: timeout in seconds for each item, each time that it is computed; 0 for no limit. Default: the
            timeout of calls.
        retries: number of times that an item may be computed again, by whichever worker is free, if the
            worker that computes it is lost. The function must be one that may run several times with an item.
            Default: the item fails with ``WorkerLostError``.

    Returns:
        An iterator, also an asynchronous one, with exactly one result or error for each item. ``close()``,
        the end of a ``with`` statement, or dropping it, cancels what is under way.

    An item that fails raises its error in its place, and the iterator can then be asked for the next result.
    A worker that is lost gets no further items. In a dynamic group it gets some again when it comes back; if
    all are gone, items wait for one to come back, at most ``timeout``. Otherwise they fail with
    ``WorkerLostError``.

    Raises:
        UnknownWorkerError: there is no such worker.
        TypeError, ValueError: an argument is not of the kind described.

    Example::

        with rpc.map(score, batches, workers=["worker1", "worker2"], retries=2) as scores:
            for batch, each in zip(batches, scores):
                print(batch, each)
    """
    if not callable(function):
        raise not_callable(function)
    if not isinstance(items, Iterable):
        raise TypeError(f"items must be an iterable, not {with_article(type(items))}")
    agent: AgentInterface = current_agent()
    names = _names(agent, workers)
    for value, what in ((concurrency, "concurrency"), (look_ahead, "look_ahead")):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{what} is a number of items, at least 1, not {value!r:.60}")
    if look_ahead is None:
        look_ahead = _LOOK_AHEAD * concurrency * len(names)
    work = _Work(agent, function, names, concurrency, timeout, check_retries(retries), ordered)
    return MapResults(work, items, look_ahead, partial(_drop, agent))


def _names(agent: AgentInterface, workers: Iterable[WorkerReference] | None) -> list[str]:
    """Return the names of the workers, each once."""
    if workers is None:
        me = agent.get_worker_info()
        return [info.name for info in agent.get_worker_infos() if info != me] or [me.name]
    if isinstance(workers, str | WorkerInfo) or not isinstance(workers, Iterable):
        raise TypeError(f"workers must be a list of workers, such as [{workers!r:.100}], not one")
    names = list(dict.fromkeys(agent.get_worker_info(worker).name for worker in workers))
    if not names:
        raise ValueError("workers is empty: there is no worker that could compute anything")
    return names


def _drop(agent: AgentInterface, work: _Work) -> None:
    """Close a map whose results were dropped; called by a finalizer, which may run anywhere."""
    if isinstance(agent, Agent):
        agent.executor.submit((_Work.close, work))

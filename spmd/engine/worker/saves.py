"""A worker's copies of its values at certain steps, and of its neighbour's.

The driver orders a save after every some programs. Each worker then copies all of its values, which costs one
copy of those that are new since the last save, and sends the shards of which no other worker has a replica to
the worker after it. A save is complete when all workers have theirs and their neighbour's; until then the one
before it stays.

If a worker is lost, the others go back to the newest complete save. The worker in its place gets the shards
from the neighbour of the lost one, and all other values, which are equal everywhere, as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from rpc.agent.futures import Future
from rpc.errors import GivenUpError, RpcError
from spmd.engine.program.step_messages import Save
from spmd.engine.worker.worker_engine import LOST, WorkerEngine, copied

__all__ = ["Saved", "Saves"]

_LEFT: Final = "the worker has left SPMD mode"


@dataclass(frozen=True, slots=True)
class Saved:
    """What a worker needs to take the place of another.

    Attributes:
        values: its values.
        lost: ids of values that could not be computed.
        sharded: ids of those of which each worker has another part.
        random_state: state of the generator that is the same on all workers.
    """

    values: dict[int, Tensor]
    lost: tuple[int, ...]
    sharded: tuple[int, ...]
    random_state: Tensor


class Saves:
    """The saves of one worker. ``save`` and ``restore`` are called by the thread that does the steps, or
    while it does none; the rest from any thread.

    Args:
        engine: the worker's values.
    """

    def __init__(self, engine: WorkerEngine) -> None:
        self._engine = engine
        self._neighbour: Any = None
        self._lock = threading.Lock()
        self._own: dict[int, dict[int, Tensor]] = {}
        self._sharded: dict[int, tuple[int, ...]] = {}
        self._random: dict[int, Tensor] = {}
        self._kept: dict[int, dict[int, Tensor]] = {}
        self._done: dict[int, Future[None]] = {}
        self._closed = False

    def next_to(self, neighbour: Any) -> None:
        """Set the reference to the worker that keeps this one's shards."""
        self._neighbour = neighbour

    def save(self, order: Save) -> None:
        """Copy the values, and begin to send the new shards to the neighbour."""
        values = self._engine.values
        last = self._own.get(order.number - 1, {})
        fresh = copied({number: value for number, value in values.items() if number not in last})
        own = {number: fresh[number] if number in fresh else last[number] for number in values}
        before = self._sharded.get(order.number - 1, ())
        sharded = tuple([number for number in (*before, *order.sharded) if number in own])
        with self._lock:
            self._own[order.number], self._sharded[order.number] = own, sharded
            self._random[order.number] = self._engine.random_state()
        self._send(order.number, {number: own[number] for number in order.sharded if number in fresh})

    def send_again(self, number: int) -> Future[None]:
        """Send all shards of a save to the neighbour, which has none yet."""
        own = self._own[number]
        with self._lock:
            self._done[number] = Future()
        self._send(number, {each: own[each] for each in self._sharded[number]})
        return self.done(number)

    def _send(self, number: int, new: Mapping[int, Tensor]) -> None:
        done = self.done(number)
        shards = {each: value for each, value in new.items() if value is not LOST}

        def pass_on(answer: Any) -> None:
            if done.done():  # it was abandoned
                return
            try:
                done.set_result(answer.value())
            except Exception as error:
                _fail(done, error)

        try:
            kept = self._neighbour.rpc_async(timeout=0).keep(number, self._sharded[number], shards)
        except RpcError as error:  # it is gone
            _fail(done, error)
        else:
            kept.add_done_callback(pass_on)

    def keep(self, number: int, sharded: tuple[int, ...], new: Mapping[int, Tensor]) -> None:
        """Keep another worker's shards: the new ones, and those of its last save that it still has."""
        with self._lock:
            last = self._kept.get(number - 1, {})
            self._kept[number] = {
                each: new[each] if each in new else last[each]
                for each in sharded
                if each in new or each in last
            }

    def done(self, number: int) -> Future[None]:
        """Return a future that is done when this worker and its neighbour have a save; failed after
        ``close``.
        """
        with self._lock:
            if not self._closed:
                return self._done.setdefault(number, Future())
        ended: Future[None] = Future()
        ended.set_exception(GivenUpError(_LEFT))
        return ended

    def of_neighbour(self, number: int) -> Saved:
        """Return the values of the worker whose shards are kept here, at a save that is complete."""
        with self._lock:
            own, sharded, kept = self._own[number], self._sharded[number], self._kept[number]
            lost = [each for each, value in own.items() if value is LOST]
            shared = {each: own[each] for each in own.keys() - set(sharded) - set(lost)}
            return Saved(shared | kept, tuple(lost), sharded, self._random[number])

    def restore(self, number: int) -> None:
        """Go back to a save."""
        self._abandon(number, "the workers went back to an earlier save")
        self._engine.restore(self._own[number], self._random[number])

    def take_over(self, number: int, saved: Saved) -> None:
        """Take the place of a lost worker."""
        self._own[number] = {**saved.values, **dict.fromkeys(saved.lost, LOST)}
        self._sharded[number], self._random[number] = saved.sharded, saved.random_state
        self.restore(number)

    def complete(self, number: int) -> None:
        """Forget the saves before one that all workers have."""
        with self._lock:
            self._drop(lambda each: each < number)

    def close(self) -> None:
        """Forget all saves; those that are awaited fail, now and later."""
        with self._lock:
            self._closed = True
        self._abandon(-1, _LEFT)

    def _abandon(self, number: int, reason: str) -> None:
        """Forget the saves after one, which fail where they are awaited."""
        with self._lock:
            abandoned = [future for each, future in self._done.items() if each > number]
            self._drop(lambda each: each > number)
        for future in abandoned:
            _fail(future, GivenUpError(reason))

    def fail(self, number: int, error: Exception) -> None:
        """Note that a save could not be made."""
        _fail(self.done(number), error)

    def _drop(self, goes: Callable[[int], bool]) -> None:
        saves: dict[int, Any]
        for saves in (self._own, self._sharded, self._random, self._kept, self._done):
            for each in [each for each in saves if goes(each)]:
                del saves[each]


def _fail(done: Future[None], error: Exception) -> None:
    """Fail a future, unless it was abandoned."""
    if not done.done():
        done.set_exception(error)

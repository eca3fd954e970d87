"""Rank 0 of a served model gives all shards their work, in one order.

Every call, backward and other operation of a model makes collectives. If the shards did two of them in
different orders, each would wait for the other. So clients ask rank 0 alone, whose one thread tells the
others what to do, does its own part, and only then goes on.

*Failure.* Where all shards refuse an operation, as they do a wrong input, they stand where they stood, and
the model goes on. Where only some do, or one is gone, nobody knows what the others would take the next
collective for: the model has failed, for good.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from rpc.agent.futures import Future
from rpc.errors import RpcError, WorkerLostError
from rpc.functions import async_execution
from rpc.runtime.current import current_agent
from rpc.runtime.torch_internals import pytree
from rref import RRef
from spmd.collectives.errors import CollectiveError
from spmd.tensor_parallel.errors import ParallelError, ShardLostError
from spmd.tensor_parallel.shard import ModelShard, Outcome

__all__ = ["Coordinator", "coordinate"]

logger = logging.getLogger(__name__)

_GRACE: Final = 5.0
"""Seconds that the others have to come to an end when one shard has failed."""


def coordinate(
    shards: Sequence[RRef[ModelShard]], workers: Sequence[str], max_batch_size: int
) -> RRef[Coordinator]:
    """Make the coordinator of a model. Called remotely, at rank 0."""
    return RRef(Coordinator(shards, workers, max_batch_size))


@dataclass(eq=False)
class _Operation:
    """Something that all shards do."""

    name: str
    args: tuple[Any, ...]
    context: Context
    future: Future[Any]

    @property
    def rows(self) -> Tensor | None:
        """The only input, if this is a call that can be done together with others."""
        if self.name != "forward":
            return None
        (call,) = self.args
        if call.wanted is not None or call.kwargs or len(call.args) != 1:
            return None
        (given,) = call.args
        return given if isinstance(given, Tensor) and given.ndim else None


class Coordinator:
    """Gives the shards of one model their work. ``run`` and ``close`` from any thread.

    Args:
        shards: by rank.
        workers: their names.
        max_batch_size: how many rows calls may have that are done together.
    """

    def __init__(
        self, shards: Sequence[RRef[ModelShard]], workers: Sequence[str], max_batch_size: int
    ) -> None:
        self._own = shards[0].local_value()
        self._others = dict(enumerate(shards[1:], start=1))
        self._workers = workers
        self._most = max_batch_size
        self._numbers = itertools.count(1)
        self._failure: RpcError | None = None
        self._waiting: deque[_Operation] = deque()
        self._changed = threading.Condition()
        self._closed = False
        current_agent().lifecycle.hooks.close.append(self._stop)
        threading.Thread(target=self._work, name="farcall-served-model", daemon=True).start()

    @async_execution
    def run(self, name: str, args: tuple[Any, ...]) -> Future[Any]:
        """Have all shards do something, after all that was asked for before.

        Args:
            name: of a method of ``ModelShard``.
            args: for it.

        Returns:
            A future of what rank 0's shard returns.
        """
        operation = _Operation(name, args, copy_context(), Future())
        with self._changed:
            if not self._closed:
                self._waiting.append(operation)
                self._changed.notify()
                return operation.future
        operation.future.set_exception(self._ended())
        return operation.future

    def close(self) -> None:
        """Free the shards, once all that was asked for is done. Idempotent."""
        with self._changed:
            if self._closed:
                return
        self.run("close", ()).wait()
        self._stop()

    def _stop(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _ended(self) -> ParallelError:
        return ParallelError("the model is closed")

    # ---- the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    left, self._waiting = list(self._waiting), deque()
                    break
                together = self._next()
            self._do(together)
        for operation in left:
            operation.future.set_exception(self._ended())

    def _next(self) -> list[_Operation]:
        """The next operation, with calls that can be done together with it."""
        together = [self._waiting.popleft()]
        first = together[0].rows
        if first is None:
            return together
        count = len(first)
        while self._waiting:
            rows = self._waiting[0].rows
            if rows is None or rows.shape[1:] != first.shape[1:] or rows.dtype != first.dtype:
                break
            count += len(rows)
            if count > self._most:
                break
            together.append(self._waiting.popleft())
        return together

    def _do(self, together: list[_Operation]) -> None:
        try:
            if len(together) > 1:
                self._do_together(together)
                return
        except Exception as error:
            logger.debug("%d calls that were to be done together are done singly: %s", len(together), error)
        for operation in together:
            try:
                value = operation.context.run(self._on_all, operation.name, operation.args)
            except Exception as error:
                operation.future.set_exception(error)
            else:
                operation.future.set_result(value)

    def _do_together(self, together: list[_Operation]) -> None:
        inputs = [each.rows for each in together]
        sizes = [len(rows) for rows in inputs if rows is not None]
        joined = replace(
            together[0].args[0], args=(torch.cat([rows for rows in inputs if rows is not None]),)
        )
        outcome = self._on_all("forward", (joined,))
        leaves = pytree.tree_leaves(outcome.value)
        if not all(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == sum(sizes) for leaf in leaves):
            raise ParallelError("the model's results cannot be cut into those of calls")
        begin = 0
        for operation, size in zip(together, sizes, strict=True):
            value = pytree.tree_map_only(Tensor, partial(_cut, begin, size), outcome.value)
            operation.future.set_result(Outcome(value, (), 0))
            begin += size

    def _on_all(self, name: str, args: tuple[Any, ...]) -> Any:
        """Have all shards do something at the same time; what the own one returns."""
        if self._failure is not None and name != "close":
            raise copy(self._failure)
        if name == "forward":
            seed = int(torch.randint(2**62, ()).item())
            args = (replace(args[0], number=next(self._numbers), seed=seed),)
        turn = _Turn(self._own.abort)
        value = None
        with torch.no_grad():
            for rank, shard in self._others.items():
                turn.call(rank, shard, name, args)
            if len(turn.calls) == len(self._others):  # else the others would wait in vain, or none has begun
                try:
                    value = getattr(self._own, name)(*args)
                except Exception as error:
                    turn.note(0, error)
        turn.finish()
        if turn.failed:
            raise self._failed(name, turn)
        return value

    def _failed(self, name: str, turn: _Turn) -> Exception:
        """What is raised for an operation that has failed on some shards."""
        failed = turn.failed
        lost = next((rank for rank, error in failed.items() if self._is_lost(rank, error)), None)
        if lost is not None:
            reason = getattr(failed[lost], "reason", "")
            self._failure = ShardLostError.of(lost, self._workers[lost], reason)
        elif not self._own.failed and (len(failed) == len(self._workers) or not turn.calls):
            return failed[min(failed)]
        else:
            rank, error = next(
                (each for each in failed.items() if not isinstance(each[1], CollectiveError)),
                next(iter(failed.items())),
            )
            self._own.abort(f"{name} has failed at rank {rank}")
            self._failure = ParallelError(
                f"the model has ended, since {name} has failed at rank {rank} (worker "
                f"'{self._workers[rank]}') and not alike on all shards: {type(error).__name__}: {error}"
            )
        self._failure.__cause__ = failed[min(failed)]
        return copy(self._failure)

    def _is_lost(self, rank: int, error: Exception) -> bool:
        return isinstance(error, WorkerLostError) and error.worker == self._workers[rank]


class _Turn:
    """One operation, under way on all shards.

    Attributes:
        calls: of the other shards, by rank.
        failed: in what it has ended, by rank, where it has failed.
    """

    def __init__(self, abort: Callable[[str], object]) -> None:
        self.calls: dict[int, Future[Any]] = {}
        self.failed: dict[int, Exception] = {}
        self._late = threading.Timer(_GRACE, abort, ("the others have not come to an end after an error",))
        self._late.daemon = True
        self._lock = threading.Lock()

    def call(self, rank: int, shard: RRef[ModelShard], name: str, args: tuple[Any, ...]) -> None:
        """Have another shard begin."""
        try:
            self.calls[rank] = getattr(shard.rpc_async(timeout=0), name)(*args)
        except Exception as error:
            self.note(rank, error)
        else:
            self.calls[rank].add_done_callback(partial(self._ended, rank))

    def _ended(self, rank: int, call: Any) -> None:
        try:
            call.value()
        except Exception as error:
            self.note(rank, error)

    def note(self, rank: int, error: Exception) -> None:
        """It has failed on a shard: the others have not for ever."""
        with self._lock:
            if not self.failed:
                self._late.start()
            self.failed.setdefault(rank, error)

    def finish(self) -> None:
        """Wait for all."""
        for rank, call in self.calls.items():
            try:
                call.wait()
            except Exception as error:
                self.note(rank, error)
        self._late.cancel()


def _cut(begin: int, size: int, tensor: Tensor) -> Tensor:
    return tensor[begin : begin + size]

"""Rank 0 of a served model schedules the operations of all shards, in one order.

Every call, backward pass and other operation of a model uses collectives. If the shards executed two of them
in different orders, each would wait for the other. So clients ask rank 0 alone, whose only thread has all
shards execute one operation (:class:`~spmd.workers.worker_set.WorkerSet`) before it continues.

*Failure.* If all shards refuse an operation, for example because of a wrong input, their state has not
changed, and the model continues. If only some do, or one is gone, the others could be in different
collectives: the model has failed, for good.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextvars import Context, copy_context
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from rpc.agent.border import Work
from rpc.agent.futures import Future
from rpc.errors import RpcError, WorkerLostError
from rpc.functions import async_execution
from rpc.runtime.current import current_agent
from rref import RRef
from spmd.tensor_parallel.errors import ParallelError, ShardLostError
from spmd.tensor_parallel.shard import ModelShard, Outcome, Task
from spmd.workers.joined_calls import JoinableCall, join, split
from spmd.workers.worker_set import OwnPort, RemotePort, WorkerSet, cause_of

__all__ = ["Coordinator", "coordinate"]

logger = logging.getLogger(__name__)

_GRACE: Final = 5.0
"""Time in seconds for the others to end an operation in which one shard has failed."""


def coordinate(
    shards: Sequence[RRef[ModelShard]], workers: Sequence[str], max_batch_size: int
) -> RRef[Coordinator]:
    """Make the coordinator of a model. Called remotely, at rank 0."""
    return RRef(Coordinator(shards, workers, max_batch_size))


@dataclass(eq=False)
class _Operation:
    """An operation that all shards execute."""

    name: str
    args: tuple[Any, ...]
    context: Context
    future: Future[Any]
    work: Work | None
    """The device work that its tensors come with, if it has any on devices."""

    @property
    def joinable(self) -> JoinableCall | None:
        """The call, if it can be executed together with others."""
        if self.name != "forward":
            return None
        (call,) = self.args
        return JoinableCall.of(call.args, call.kwargs) if call.wanted is None else None


class Coordinator:
    """Schedules the operations of one model's shards. ``run`` and ``close`` from any thread.

    Args:
        shards: the shards, by rank.
        workers: their names.
        max_batch_size: maximum number of rows of calls that are executed together.
    """

    def __init__(
        self, shards: Sequence[RRef[ModelShard]], workers: Sequence[str], max_batch_size: int
    ) -> None:
        self._own = shards[0].local_value()
        self._workers = workers
        others = [RemotePort(*each) for each in zip(workers[1:], shards[1:], strict=True)]
        self._set = WorkerSet(
            [OwnPort(workers[0], self._own), *others], "an operation of a served model", _GRACE, last=0
        )
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
        """Have all shards execute an operation, after all earlier ones.

        Args:
            name: name of a method of ``ModelShard``.
            args: its arguments.

        Returns:
            A future of the return value of rank 0's shard.
        """
        agent: Any = current_agent()
        operation = _Operation(name, args, copy_context(), Future(), agent.calls.requests.border.work())
        with self._changed:
            if not self._closed:
                self._waiting.append(operation)
                self._changed.notify()
                return operation.future
        operation.future.set_exception(self._ended())
        return operation.future

    def close(self) -> None:
        """Free the shards, once all earlier operations are done. Idempotent."""
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
            for operation in together:
                if operation.work is not None:
                    operation.work.join(operation.args)
            self._do(together)
        for operation in left:
            operation.future.set_exception(self._ended())

    def _next(self) -> list[_Operation]:
        """Return the next operation, with calls that can be executed together with it."""
        together = [self._waiting.popleft()]
        first = together[0].joinable
        if first is None:
            return together
        count = first.rows
        while self._waiting:
            call = self._waiting[0].joinable
            if call is None or call.kind != first.kind:
                break
            count += call.rows
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
        calls = [call for each in together if (call := each.joinable) is not None]
        args, kwargs = join(calls)
        outcome = self._on_all("forward", (replace(together[0].args[0], args=tuple(args), kwargs=kwargs),))
        values = split(outcome.value, [call.rows for call in calls])
        for operation, value in zip(together, values, strict=True):
            operation.future.set_result(Outcome(value, (), 0))

    def _on_all(self, name: str, args: tuple[Any, ...]) -> Any:
        """Have all shards execute an operation at the same time; returns the value of this worker's shard."""
        if self._failure is not None and name != "close":
            raise copy(self._failure)
        if name == "forward":
            seed = int(torch.randint(2**62, (), device="cpu").item())
            args = (replace(args[0], number=next(self._numbers), seed=seed),)
        task = Task(self._set.number, name, args)
        values, failed = self._set.wait(task.sequence, self._set.send([task] * len(self._workers)))
        if failed:
            raise self._failed(name, failed)
        return values[0]

    def _failed(self, name: str, failed: dict[int, Exception]) -> Exception:
        """Return the error to raise for an operation that has failed on some shards."""
        lost = next((rank for rank, error in failed.items() if self._is_lost(rank, error)), None)
        if lost is not None:
            reason = getattr(failed[lost], "reason", "")
            self._failure = ShardLostError.of(lost, self._workers[lost], reason)
        elif not self._own.failed and len(failed) == len(self._workers):
            return failed[0]
        else:
            rank = cause_of(failed)
            self._own.abort(f"{name} has failed at rank {rank}")
            self._failure = ParallelError(
                f"the model has ended, since {name} has failed at rank {rank} (worker "
                f"'{self._workers[rank]}') and not alike on all shards: "
                f"{type(failed[rank]).__name__}: {failed[rank]}"
            )
        self._failure.__cause__ = failed[min(failed)]
        return copy(self._failure)

    def _is_lost(self, rank: int, error: Exception) -> bool:
        return isinstance(error, WorkerLostError) and error.worker == self._workers[rank]

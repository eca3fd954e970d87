"""The worker's side: one thread does a worker's steps in the order of their numbers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Protocol

import rpc
from rpc.agent.futures import Future
from rpc.group.workers import WorkerInfo
from rpc.runtime.current import current_agent
from rpc.runtime.modes import with_default_modes
from rpc.serialization.failures import text_of

__all__ = ["StepQueue"]


class _Numbered(Protocol):
    @property
    def sequence(self) -> int: ...


class StepQueue:
    """Steps of a worker. They may arrive in any order, on any thread.

    If the driver is lost, the queue stops: other workers may never get the step in which this one waits for
    them.

    Args:
        run: does a step; what it returns is the answer.
        driver: the name of the worker that sends steps.
        abort: ends what a step may wait in, for a reason. Called if the driver is lost.
        ended: makes the error of steps that come after the end.
        release: called on the thread when it has done its last step.
        first: number of the first step.
    """

    def __init__(
        self,
        run: Callable[[Any], Any],
        driver: str,
        abort: Callable[[str], None],
        ended: Callable[[], Exception],
        release: Callable[[], object] = lambda: None,
        first: int = 0,
    ) -> None:
        self._run, self._driver, self._abort = run, driver, abort
        self._ended, self._release = ended, release
        self._waiting: dict[int, tuple[_Numbered, Context, Future[Any]] | None] = {}
        self._next = first
        self._stopped = False
        self._changed = threading.Condition()
        self._watch = rpc.on_worker_lost(self._lost)
        current_agent().lifecycle.hooks.close.append(partial(_stop, weakref.ref(self)))
        self._thread = threading.Thread(target=self._work, name="farcall-spmd-worker", daemon=True)
        self._thread.start()

    def put(self, step: _Numbered) -> Future[Any]:
        """Have a step done when those before it are done. It runs in a copy of the caller's context.

        Returns:
            A future of its answer.
        """
        future: Future[Any] = Future()
        with self._changed:
            if not self._stopped:
                self._waiting[step.sequence] = (step, copy_context(), future)
                self._changed.notify()
                return future
        future.set_exception(self._ended())
        return future

    def skip(self, number: int) -> None:
        """Do not wait for a step, which the driver could not send. If it has come, it is done."""
        with self._changed:
            if number >= self._next and not self._stopped:
                self._waiting.setdefault(number, None)
                self._changed.notify()

    def stop(self) -> None:
        """Do no further step. Idempotent."""
        self._watch.close()
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def close(self) -> None:
        """Stop, and wait until the step under way is done. Idempotent."""
        self.stop()
        self._thread.join()

    def _lost(self, worker: WorkerInfo, reason: str) -> None:
        if worker.name == self._driver:
            self.stop()
            self._abort(reason)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next in self._waiting or self._stopped)
                if self._stopped:
                    break
                arrived = self._waiting.pop(self._next)
                self._next += 1
            if arrived is None:
                continue
            step, context, future = arrived
            try:
                answer = context.run(with_default_modes, self._run, step)
            except BaseException as error:  # SystemExit: it ends the step, not this thread
                future.set_exception(_as_exception(error))
            else:
                future.set_result(answer)
            del arrived, step, context, future
        for left in self._waiting.values():
            if left is not None:
                _, _, future = left
                future.set_exception(self._ended())
        self._waiting.clear()
        self._release()


def _as_exception(error: BaseException) -> Exception:
    """Return an error as a future accepts it."""
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
    wrapped.__cause__ = error
    return wrapped


def _stop(reference: weakref.ref[StepQueue]) -> None:
    """The agent ends. It keeps no queue that has ended before."""
    queue = reference()
    if queue is not None:
        queue.stop()

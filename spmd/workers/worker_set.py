"""The driver's side of a set of workers: sends steps, waits for them, and ends what cannot end by itself.

All workers get the same steps in the same order, since the collectives in steps meet by their order alone. If
a worker fails in a step, the others may wait for it in a collective. They have some seconds to come to an
end; then the collective is aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, cast

from rpc.agent.futures import Future
from rpc.agent.waiting import as_completed, wait_futures
from rpc.errors import GivenUpError, RpcError, RpcTimeoutError
from rpc.runtime import waits
from rpc.runtime.interrupts import is_interruption, protected
from spmd.collectives.errors import CollectiveError

__all__ = ["OwnPort", "Port", "RemotePort", "WorkerSet", "cause_of", "wait_together"]

_PATIENCE: Final = 10.0
"""Seconds in which calls that can only end together end, once one of them has failed."""


class Port(Protocol):
    """A worker, as its driver sees it."""

    name: str

    def send(self, step: Any) -> Any:
        """Have it do a step; a future of its answer."""
        ...

    def abort(self, reason: str) -> None:
        """End the collective that it may wait in. Returns at once."""
        ...

    def skip(self, number: int) -> None:
        """Have it not wait for a step, if it has not got that. Returns at once."""
        ...


class RemotePort:
    """A worker behind calls.

    Args:
        name: of the worker.
        worker: a reference to an object there that has ``do``, ``abort`` and ``skip``.
    """

    def __init__(self, name: str, worker: Any) -> None:
        self.name = name
        self.worker = worker
        self.do: Callable[..., Any] = worker.rpc_async(timeout=0).do

    def send(self, step: Any) -> Any:
        """Have it do a step; a future of its answer. Raises if the step cannot be sent."""
        return self.begun(self.do(step))

    @staticmethod
    def begun(answer: Any) -> Any:
        """Return the future of a call; raises its error if it has failed already."""
        if answer.done():
            answer.value()
        return answer

    def abort(self, reason: str) -> None:
        """End the collective that it may wait in. Returns at once."""
        self.worker.rpc_async(timeout=0).abort(reason)

    def skip(self, number: int) -> None:
        """Have it not wait for a step, if it has not got that. Returns at once."""
        self.worker.rpc_async(timeout=0).skip(number)


class OwnPort:
    """A worker that is the driver's process itself.

    Args:
        name: of the worker.
        worker: the object that has ``do``, ``abort`` and ``skip``.
    """

    def __init__(self, name: str, worker: Any) -> None:
        self.name = name
        self.send, self.abort, self.skip = worker.do, worker.abort, worker.skip


class WorkerSet:
    """Workers that do the same steps. One thread at a time sends and waits; ``abort`` from any.

    Args:
        ports: the workers.
        what: the name of a step, for observers.
        grace: seconds in which the others end a step, once one worker has failed in it.
        has_failed: whether an answer says that its worker has failed, so that others may wait for it.
        last: a worker that is sent a step when all others have it.

    Attributes:
        number: of the next step, from 0.
    """

    def __init__(
        self,
        ports: Sequence[Port],
        what: str,
        grace: float,
        has_failed: Callable[[Any], bool] = lambda answer: False,
        last: int | None = None,
    ) -> None:
        self.number = 0
        self._ports = tuple(ports)
        self._what = what
        self._grace = grace
        self._has_failed = has_failed
        self._order = sorted(range(len(self._ports)), key=lambda worker: worker == last)

    def __len__(self) -> int:
        return len(self._ports)

    def replace(self, place: int, port: Port) -> None:
        """Put another worker in the place of a lost one. No step is under way."""
        self._ports = (*self._ports[:place], port, *self._ports[place + 1 :])

    @protected
    def send(self, steps: Sequence[Any], answers: list[Any] | None = None) -> list[Any]:
        """Send a step.

        Args:
            steps: for each worker. They have the number of the next step.
            answers: list to put the futures into, complete even if a signal handler interrupts this.

        Returns:
            A future of each worker's answer. If a worker cannot be sent the step, its future has that error.
            The others do the step; but if it is the first, no worker does, and all futures have the error.
            ``wait`` has those without the step continue with the next one. If a signal handler interrupts
            this, no further worker is sent the step.
        """
        answers = [] if answers is None else answers
        answers[:] = [None] * len(steps)
        self.number += 1
        for place, worker in enumerate(self._order):
            try:
                answers[worker] = self._ports[worker].send(steps[worker])
            except BaseException as error:
                interrupts = not isinstance(error, Exception) or is_interruption(error)
                failed = _failed(self._interrupted(error) if interrupts else cast("Exception", error))
                without = self._order[place:] if interrupts or place == 0 else [worker]
                for each in without:
                    answers[each] = failed
                if interrupts:
                    raise
                if place == 0:
                    break
        return answers

    def _interrupted(self, error: BaseException) -> RpcError:
        return RpcError(
            f"{self._what} was interrupted by {type(error).__name__} while it was sent, so that not all "
            f"{len(self)} workers have got it. They cannot go on together: end them, and begin again"
        )

    def wait(
        self, number: int, answers: Sequence[Any], **details: Any
    ) -> tuple[list[Any], dict[int, Exception]]:
        """Wait until all workers have ended a step.

        Args:
            number: of the step.
            answers: what ``send`` has returned.
            details: facts about the step, for observers.

        Returns:
            What each has answered, or None; and the errors of those that have not, by worker.
        """
        grace = _Grace(self._grace, self.abort)
        for each in answers:
            each.add_done_callback(lambda answer: self._look(answer, grace))
        values: list[Any] = [None] * len(answers)
        failed: dict[int, Exception] = {}
        with waits.waiting(self._what, lambda: self._awaited(answers), **details):
            for worker, each in enumerate(answers):
                try:
                    values[worker] = each.wait()
                except Exception as error:
                    if is_interruption(error):
                        raise
                    failed[worker] = error
                    self._skip(worker, number)  # it may not have got the step
        grace.end()
        return values, failed

    def _skip(self, worker: int, number: int) -> None:
        with suppress(RpcError):  # it is gone
            self._ports[worker].skip(number)

    def _awaited(self, answers: Sequence[Any]) -> list[str]:
        return [port.name for port, answer in zip(self._ports, answers, strict=True) if not answer.done()]

    def _look(self, answer: Any, grace: _Grace) -> None:
        try:
            has_failed = self._has_failed(answer.value())
        except Exception:
            has_failed = True
        if has_failed:
            grace.begin()

    def abort(self, reason: str) -> None:
        """End the collectives that workers may wait in. Returns at once."""
        for port in self._ports:
            with suppress(RpcError):  # it is gone
                port.abort(reason)


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


class _Grace:
    """The time in which workers end a step in which one of them has failed."""

    def __init__(self, seconds: float, abort: Callable[[str], None]) -> None:
        self._seconds, self._abort = seconds, abort
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._ended = False

    def begin(self) -> None:
        """A worker has failed. Again: nothing."""
        with self._lock:
            if self._timer is None and not self._ended:
                self._timer = threading.Timer(self._seconds, self._abort, ("another worker has failed",))
                self._timer.daemon = True
                self._timer.start()

    def end(self) -> None:
        """All have ended the step."""
        with self._lock:
            self._ended = True
            if self._timer is not None:
                self._timer.cancel()


def cause_of(errors: Mapping[int, Exception]) -> int:
    """Which of several workers' errors the others follow from.

    The first one that says more than that a collective has ended, if there is one.
    """
    return next(
        (each for each, error in errors.items() if not isinstance(error, CollectiveError)), min(errors)
    )


def wait_together(calls: Sequence[Future[Any]], give_up: Callable[[str], None]) -> list[Any]:
    """Wait for calls that can only succeed together, such as those in which workers form a group.

    Args:
        calls: one for each worker.
        give_up: has the calls end that wait for one that has failed, for a reason.

    Returns:
        What they return.

    Raises:
        BaseException: what a call has raised that was not given up because of another.
    """
    try:
        return wait_futures(list(calls))
    except BaseException as error:
        give_up(f"{type(error).__name__}: {error}")
        if isinstance(error, GivenUpError):
            raise (_cause_in(calls) or error) from None
        raise


def _cause_in(calls: Sequence[Future[Any]]) -> BaseException | None:
    with suppress(RpcTimeoutError):
        for call in as_completed(calls, _PATIENCE):
            try:
                call.value()
            except GivenUpError:
                pass
            except BaseException as error:
                return error
    return None

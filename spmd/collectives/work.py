"""The result of an operation: c10d's ``Work``, which user code, autograd's threads and C++ wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed import Work

from rpc.runtime.blocking import INFINITE, check_may_block, wait_for
from rpc.runtime.interrupts import interruptible, is_interruption, protected
from rpc.runtime.tasks import Task
from spmd.collectives import profiling
from spmd.collectives.arguments import seconds_of
from spmd.collectives.errors import CollectiveError, CollectiveTimeoutError
from spmd.collectives.flight_recorder import Record

if TYPE_CHECKING:
    from spmd.collectives.staged import Staged

__all__ = ["GroupWork"]

_UNSET: Final = timedelta(0)


class GroupWork(Work):
    """One operation of a group.

    Args:
        what: its name in errors.
        outputs: result of ``result``.
        perform: performs it, for a sequencer; None if it is ended by ``finish``.
        help_run: called by a waiting thread with this work, to run what is queued up to it; None without a
            sequencer.
        run_soon: runs callbacks on another thread if the system gives none for them; not needed with a
            sequencer.

    Attributes:
        done: whether it has ended, successfully or not.
        error: the error that it failed with, or None.
        record: its entry in the flight recorder, or None.
    """

    def __init__(
        self,
        what: str,
        outputs: Sequence[torch.Tensor],
        perform: Callable[[], object] | None = None,
        help_run: Callable[[GroupWork], object] | None = None,
        run_soon: Callable[[Sequence[Task]], object] | None = None,
    ) -> None:
        super().__init__()
        self.what = what
        self.done = False
        self.error: BaseException | None = None
        self.record: Record | None = None
        self.sender = -1
        self._outputs = outputs
        self._staged: Staged | None = None
        self._perform = perform
        self._help_run = help_run
        self._run_soon = run_soon
        self._waiters: list[threading.Lock] = []
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()
        self._settle: Callable[[], object] | None = None
        self._end_event: Callable[[], object] | None = None
        self._limit = 0.0
        self._expired: Callable[[], object] | None = None

    # ---- whoever does it

    def show(self, operation: str, tensors: Sequence[torch.Tensor]) -> None:
        """Show the work in PyTorch's profiler, from now to its end."""
        self._end_event = profiling.begin(operation, tensors)

    def stage(self, staged: Staged, outputs: Sequence[torch.Tensor]) -> None:
        """Make the streams of waiting threads wait for the results, which are on an accelerator."""
        self._staged, self._outputs = staged, outputs

    def expires(self, limit: float, expired: Callable[[], object]) -> None:
        """Make waiting threads give up after ``limit`` seconds; ``expired`` is called then, and the work
        fails.
        """
        self._limit, self._expired = limit, expired

    @protected
    def run(self) -> None:
        """Perform it; for a ``Sequencer``."""
        assert self._perform is not None
        if self.record is not None:
            self.record.start()
        try:
            self._call(self._perform)
        except BaseException as error:
            if isinstance(error, Exception) and not is_interruption(error):
                self.finish(error)
                return
            self.finish(CollectiveError(f"{self.what} was interrupted: {type(error).__name__}"))
            raise
        else:
            self.finish()

    @interruptible
    def _call(self, perform: Callable[[], object]) -> None:
        perform()

    def then(self, settle: Callable[[], object]) -> None:
        """Call ``settle`` before the work is done, if it succeeds."""
        with self._lock:
            if not self.done:
                self._settle = settle
                return
        if self.error is None:
            settle()

    @protected
    def finish(self, error: BaseException | None = None) -> None:
        """End it. Only the first call counts. From any thread."""
        with self._lock:
            if self.done:
                return
            if self._settle is not None and error is None:
                try:
                    self._settle()
                except Exception as failure:
                    error = failure
            if self._end_event is not None:
                self._end_event()
            if self.record is not None:
                self.record.end(succeeded=error is None)
            self.error = error
            dropped = self._perform, self._settle, self._end_event
            self._perform = self._settle = self._end_event = None
            self.done = True
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.release()
        del dropped  # without the lock, as tensors may have finalizers
        if self._help_run is None and self.has_callbacks:  # this may be the agent's thread
            try:
                threading.Thread(target=self.call_back, name="farcall-callbacks", daemon=True).start()
            except RuntimeError:  # the system has no more threads
                if self._run_soon is None:
                    raise
                self._run_soon([(lambda _: self.call_back(), None)])

    @property
    def has_callbacks(self) -> bool:
        """Whether a future was requested that is still to be completed."""
        return self._future is not None

    @interruptible
    def call_back(self) -> None:
        """Complete the future that was requested. Its callbacks are the user's, and may block."""
        with self._lock:
            future, self._future = self._future, None
        if future is not None:
            future.set_result(None)

    # ---- c10d

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Wait for the end. Streams that are current here wait for results on an accelerator.

        Args:
            timeout: maximum time to wait; 0 for the operation's own timeout.

        Raises:
            CollectiveTimeoutError: it has not ended in time; it continues.
            CollectiveError: it failed.
            TypeError, ValueError: ``timeout`` is not a ``timedelta``, or negative.
        """
        seconds = 0.0 if timeout is _UNSET else seconds_of(timeout, self.what)
        if not self.done:
            self._wait(seconds)
        if self.error is not None:
            raise self.error
        if self._staged is not None:
            self._staged.join()
        return True

    def _wait(self, seconds: float) -> None:
        check_may_block()
        if seconds <= 0 and self._help_run is not None:
            self._help_run(self)
        waiter = threading.Lock()
        waiter.acquire()
        with self._lock:
            if self.done:
                return
            self._waiters.append(waiter)
        limit = seconds if seconds > 0 else self._limit
        if wait_for(waiter, monotonic() + limit if limit > 0 else INFINITE):
            return
        if self._expired is None or limit is seconds:
            raise CollectiveTimeoutError(
                f"{self.what} has not ended after {limit:g} s; it is still under way"
            )
        self._expired()
        self.finish(CollectiveTimeoutError(f"{self.what} has timed out after {limit:g} s"))

    def is_completed(self) -> bool:
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> list[torch.Tensor]:
        return list(self._outputs)

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """Return the sender, for a ``recv`` from any rank."""
        return self.sender

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the outputs. It fails through ``then``: in the backward of
        ``DistributedDataParallel`` a future that fails by ``set_exception`` ends the process.
        """
        devices: list[Any] = [] if self._staged is None else list(self._staged.devices)
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        with self._lock:
            done = self.done
            if not done:
                if self._future is None:
                    self._future = future
                future = self._future
        if done:
            future.set_result(None)
        return future.then(self._outcome)

    def _outcome(self, _: torch.futures.Future[Any]) -> list[torch.Tensor]:
        if self.error is not None:
            raise self.error
        if self._staged is not None:
            self._staged.join()
        return list(self._outputs)

"""A message in transit, for its sender or its receiver: how a thread waits for its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Final

from rpc.bulk.copying import scatter
from rpc.errors import NoMemoryError, RpcError, RpcTimeoutError
from rpc.group.peer import Peer
from rpc.runtime.blocking import INFINITE, check_may_block
from rpc.runtime.interrupts import interruptible, protected
from rpc.transport.inline_read import Awaited
from rpc.transport.write_queue import STREAMED_BYTES
from rpc.wire.reassembly import Incomplete
from rpc.wire.targets import Merger

__all__ = ["Transfer", "as_bytes"]

_SHORT_BYTES: Final = 256 << 10


def as_bytes(buffers: Any) -> list[memoryview]:
    """Return one or several buffers as views of bytes, without empty ones. Raises ``TypeError`` if one is not
    contiguous.
    """
    several: Iterable[Any] = buffers if isinstance(buffers, list | tuple) else (buffers,)
    views = [memoryview(buffer) for buffer in several]
    return [view.cast("B") for view in views if view.nbytes]


class Transfer(Awaited):
    """One message, sent or received. From any thread.

    ``buffers`` is what is sent, or the memory to receive into; None for the message's own. ``withdraw`` takes
    the transfer back if it has not begun, and returns whether it did. ``expected`` is the number of bytes
    that a message without buffers is likely to have. With a ``merger``, the message does not fill the
    buffers, but is merged into them.
    """

    def __init__(
        self,
        peer: Peer,
        what: str,
        buffers: list[memoryview] | None,
        withdraw: Callable[[Transfer], bool],
        expected: int = 0,
        merger: Merger | None = None,
    ) -> None:
        super().__init__()
        self.what = what
        self.merger = merger
        self.buffers = buffers
        self.size = expected if buffers is None else sum(map(len, buffers))
        self._peer = peer
        self._done = False
        self._withdraw = withdraw
        self._error: BaseException | None = None
        self._delivered: list[Sequence[memoryview]] = []
        self._callbacks: list[Callable[[Transfer], object]] = []

    def done(self) -> bool:
        """Whether it has ended, successfully or not. The buffers belong to the caller again then."""
        return self._done

    def wait(self, timeout: float | None = None) -> list[memoryview]:
        """Block until it has ended.

        Args:
            timeout: maximum time in seconds; None for no limit. After a timeout the transfer continues: wait
                again, or ``cancel`` it.

        Returns:
            The buffers: those given, or those of the message.

        Raises:
            RpcTimeoutError: the time is over.
            WorkerLostError: the other worker is lost.
            RpcError: the message has another size than the posted buffers.
        """
        if not self._done:
            self._wait(INFINITE if timeout is None else monotonic() + timeout)
        if self._error is not None:
            raise self._error
        return self.buffers or []

    @protected
    def _wait(self, deadline: float) -> None:
        check_may_block()
        try:
            if not self._is_streamed():
                self._peer.wait(self, deadline)
            while not self._done:
                self.fill()
                if not self.done() and not self.sleep(deadline):
                    raise RpcTimeoutError(f"{self.what} has not ended in time")
        finally:
            self.fill()  # if no other thread does, since this thread was counted on

    def _is_streamed(self) -> bool:
        """Whether it ends on another connection, so that a thread that reads this one would only spin."""
        connection = self._peer.connection
        return self.size >= STREAMED_BYTES and connection is not None and connection.has_streams

    def on_done(self, callback: Callable[[Transfer], object]) -> None:
        """Call ``callback(self)`` once it has ended, here or on the thread that ends it, which it must not
        block.
        """
        self._callbacks.append(callback)
        if self._done:
            self._run_callbacks()

    def error(self) -> BaseException | None:
        """The error that it failed with; None if it did not fail, or has not ended."""
        return self._error

    @protected
    def cancel(self, reason: str = "it was cancelled") -> bool:
        """End it with an ``RpcError`` unless the message has been sent, or has arrived; returns whether it
        was ended. Its buffers belong to the caller again then: a message that was arriving goes to the next
        post.
        """
        if not self._withdraw(self):
            return False
        self.end(RpcError(f"{self.what} has failed: {reason}"))
        return True

    # ---- for its owner, who sees to it that one calls these and no other

    def deliver(self, message: Sequence[memoryview] | None) -> bool:
        """Deliver the message; None if it was received into the buffers. Returns whether ``fill`` must be
        called, since the message is long, and no thread waits.
        """
        if message is None:
            self.end(None if self.merger is None else self.merger.error)
            return False
        if isinstance(message, Incomplete):
            self.end(NoMemoryError(f"{self.what} was dropped when it arrived: {message.reason}"))
            return False
        self._delivered.append(message)
        self.outcome = True
        longest = _SHORT_BYTES if self.merger is None else STREAMED_BYTES  # merging releases the interpreter
        if sum(map(len, message)) <= longest or self.buffers is None:
            self.fill()
        elif not self._waiters:
            return True
        else:
            self.settle(True)
        return False

    @protected
    def fill(self) -> None:
        """Copy what was delivered to its place, unless another thread does."""
        try:
            message = self._delivered.pop()
        except IndexError:
            return
        if self.buffers is None:
            self.buffers = list(message)
        elif sum(map(len, message)) != self.size:
            size = sum(map(len, message))
            self.end(RpcError(f"{self.what} has failed: the message has {size} bytes, not {self.size}"))
            return
        elif self.merger is not None:
            whole = message[0] if len(message) == 1 else memoryview(bytearray().join(message))
            self.merger.take(0, whole)
            self.end(self.merger.error)
            return
        else:
            scatter(message, self.buffers)
        self.end()

    def end(self, error: BaseException | None = None) -> None:
        """End it."""
        self._error = error
        self._done = True
        self.settle(True)
        self._run_callbacks()

    @interruptible
    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                return
            callback(self)

"""A c10d store that can be lost and opened again, and waiting with a deadline.

*Threads.* A c10d store waits in C++: ``KeyboardInterrupt`` does not reach it, and a server that is stopped or
is not a store blocks it far beyond its timeout. So all uses of a store run on a helper thread, while the
caller waits for it in Python, where a signal or the deadline ends the wait. The helper notices that at its
next pause.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Generic, NoReturn, TypeVar

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from rpc.errors import RendezvousError, RendezvousTimeoutError
from rpc.runtime.blocking import Event, wait_for_event
from rpc.runtime.interrupts import protected
from rpc.transport.authentication import Seal

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GRACE_SECONDS: Final = 2.0
"""Time in seconds beyond the deadline for the helper to report what was missing."""

_END_BYTES: Final = 256

_MISSING: Final = secrets.token_hex(16)
"""Value that a store returns in place of one that is missing; no process writes it."""

_LINE_SECONDS: Final = 2.0
"""Timeout in seconds for a TCP store to accept a connection."""


class Abandoned(Exception):
    """The caller no longer waits: it was interrupted, or has given up on a store that does not answer."""


class StoreLost(Exception):
    """The store did not answer: its server or its file is gone."""


class StoreWait:
    """A deadline, in seconds from now, and pauses that end with it or when the caller stops waiting."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._abandoned = Event()

    @property
    def remaining(self) -> float:
        """Seconds to the deadline, never negative."""
        return max(0.0, self._deadline - time.monotonic())

    def pause(self, seconds: float) -> bool:
        """Sleep, at most to the deadline; returns whether there is time left, or raises ``Abandoned``."""
        if wait_for_event(self._abandoned, min(time.monotonic() + seconds, self._deadline)):
            raise Abandoned
        return self.remaining > 0

    def abandon(self) -> None:
        """Record that the caller has stopped waiting. From any thread."""
        self._abandoned.set()


@dataclass
class Backoff:
    """Pauses that grow by half each time, from one millisecond to a longest, in seconds."""

    waiting: StoreWait
    longest: float = 0.25
    _next: float = 0.001

    def pause(self) -> bool:
        """Sleep a little longer than the last time; like ``StoreWait.pause``."""
        seconds, self._next = self._next, min(self._next * 1.5, self.longest)
        return self.waiting.pause(seconds)

    def restart(self) -> None:
        """Start with short pauses again, because something has happened."""
        self._next = 0.001


def run_with_deadline(
    work: Callable[[StoreWait], T], timeout: float, waiting_for: str, *, grace: float = _GRACE_SECONDS
) -> T:
    """Run ``work`` on a helper thread and return its result, or raise its error; abandon it at the deadline.

    Args:
        work: takes the ``StoreWait`` to pause with, and should end when that says so.
        timeout: timeout in seconds.
        waiting_for: what does not answer, for the error if ``work`` itself is blocked at the deadline.
        grace: time in seconds beyond that for ``work`` to raise its own, more specific, error.

    Raises:
        RendezvousTimeoutError: ``work`` is blocked.
    """
    waiting = StoreWait(timeout)
    try:
        outcome = start(work, waiting)
        outcome.wait(timeout + grace)
    finally:
        waiting.abandon()
    if not outcome.done():
        raise RendezvousTimeoutError(
            f"{waiting_for} accepts connections but has not answered for {timeout:g} s. Check that it is a "
            f"c10d store (rank 0 of this job, or torchrun's), not another program that has its port, and "
            f"that its process is not stopped."
        )
    try:
        return outcome.result()
    finally:
        del outcome  # breaks the cycle error -> traceback -> this frame -> outcome -> error


class Outcome(Generic[T]):
    """The result of work on another thread. A signal handler may interrupt the wait for it."""

    def __init__(self) -> None:
        self._ended = Event()
        self._result: Callable[[], T] | None = None

    def done(self) -> bool:
        """Whether the work has ended."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait at most this long; returns whether the work has ended."""
        return wait_for_event(self._ended, time.monotonic() + seconds)

    def result(self) -> T:
        """Return the result of work that has ended, or raise its error."""
        assert self._result is not None
        return self._result()

    def settle(self, work: Callable[[], T]) -> None:
        """Do the work."""
        try:
            value = work()
        except BaseException as error:
            self._result = partial(_raise, error)
        else:
            self._result = lambda: value
        self._ended.set()


def _raise(error: BaseException) -> NoReturn:
    raise error


@protected
def start(work: Callable[[StoreWait], T], waiting: StoreWait) -> Outcome[T]:
    """Run ``work`` on a thread of its own, which may be abandoned."""
    outcome = Outcome[T]()
    run = partial(outcome.settle, partial(work, waiting))
    threading.Thread(target=run, name="rpc-rendezvous", daemon=True).start()
    return outcome


Opener = Callable[[StoreWait], Store]


@dataclass
class SharedStore:
    """A c10d store with the means to open it again, under a prefix of its own.

    Keep it for as long as others may need the store: the server ends with rank 0's. Used by one thread at a
    time. All methods raise ``StoreLost`` if the store does not answer, and ``ForeignRecordError`` for a value
    (not a counter) that was not sealed with this job's token.
    """

    opener: Opener | None  # opens it again; None if that is impossible
    store: Store  # without the prefix; passed to a registered backend
    description: str  # its name in errors
    master: str | None  # the host that serves it; None for a file or a store in memory
    prefix: str = ""  # of all keys
    seal: Seal = field(default_factory=Seal)

    def __post_init__(self) -> None:
        self._file = _FileIdentity.of(self.store)
        self._line: _Line | None = None

    def under(self, prefix: str) -> SharedStore:
        """Return the same store with all keys under a prefix."""
        return replace(self, prefix=f"{self.prefix}{prefix}/")

    def sealed(self, token: bytes | None) -> SharedStore:
        """Return the same store, for workers that have a token."""
        return replace(self, seal=Seal(token))

    def run(self, work: Callable[[StoreWait], T], timeout: float) -> T:
        """Run ``work`` like ``run_with_deadline``, and once more whenever the store was lost.

        Raises:
            RendezvousTimeoutError: it was lost again and again until the deadline; the text says how the last
            time.
            RendezvousError: it was passed as an object and cannot be opened again.
        """
        return run_with_deadline(lambda waiting: self.outlast(waiting, work), timeout, self.description)

    def outlast(self, waiting: StoreWait, work: Callable[[StoreWait], T]) -> T:
        """Like ``run``, on this thread."""
        backoff = Backoff(waiting)
        while True:
            try:
                return work(waiting)
            except StoreLost as lost:
                # Most likely the server of a rank 0 that is just leaving: the next one's is about to start.
                if self.opener is None:
                    raise RendezvousError(
                        f"{self.description} failed in the middle of the rendezvous: {lost}. It was "
                        f"passed as an object, so that it cannot be opened again; is the process that serves "
                        f"it gone?"
                    ) from lost
                self.reopen(waiting)
                if not backoff.pause():
                    raise RendezvousTimeoutError(
                        f"{self.description} was opened again each time that it failed, until "
                        f"{waiting.timeout:g} s were over. The last time it said: {lost}"
                    ) from lost

    def reopen(self, waiting: StoreWait) -> None:
        """Open it again, after it was lost. Only if it has an ``opener``."""
        assert self.opener is not None
        self.forget_line()
        self.store = self.opener(waiting)
        self._file = _FileIdentity.of(self.store)

    def seems_lost(self) -> bool:
        """Whether its server or its file is gone, as far as can be determined without a request: for TCP and
        file stores. The first call starts watching; ``forget_line`` ends that.
        """
        try:
            if self._file is not None:
                self._file.check()
            elif self._line is None:
                self._line = _Line.to(self.store)
        except (OSError, StoreLost):
            return True
        return self._line is not None and self._line.broken

    def forget_line(self) -> None:
        """Stop watching."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns the sum."""
        return int(self._ask(lambda store: store.add(self.prefix + key, amount)))

    def counter(self, key: str) -> int:
        """Return a counter's value; 0 if there is none. Raises ``RendezvousError`` if it is not a number."""
        found = self._get(key) or b"0"
        try:
            return int(found)
        except ValueError:
            raise RendezvousError(self.spoilt(f"its counter '{key}' says {found[:50]!r}")) from None

    def spoilt(self, what: str) -> str:
        """Return the error text for a store with data that no worker of this job has written."""
        return f"{self.description} was written to by a process that does not belong to this job: {what}"

    def set(self, key: str, value: bytes) -> None:
        """Set a value, whatever the key had before."""
        name = self.prefix + key
        sealed = self.seal.close(name, value)
        self._ask(lambda store: store.set(name, sealed))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes | None:
        """Return the value; None if there is none. Never waits for one."""
        sealed = self._get(key)
        return None if sealed is None else self.seal.open(self.prefix + key, sealed)

    def remove(self, key: str) -> None:
        """Delete a value, if there is one."""
        self._ask(lambda store: store.delete_key(self.prefix + key))

    def _get(self, key: str) -> bytes | None:
        # ``get`` of PyTorch's stores waits for a key that is missing, and a key may be deleted at any time.
        found = self._ask(lambda store: store.compare_set(self.prefix + key, _MISSING, _MISSING))
        return None if found == _MISSING.encode() else bytes(found)

    def has(self, *keys: str) -> bool:
        """Whether all these keys have values."""
        return bool(self._ask(lambda store: store.check([self.prefix + key for key in keys])))

    def swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a value if it is still ``expected`` (empty: there is none); returns the resulting value."""
        name = self.prefix + key
        before, after = self.seal.close(name, expected) if expected else b"", self.seal.close(name, desired)
        found = self._ask(lambda store: store.compare_set(name, before, after))  # type: ignore[arg-type]
        return self.seal.open(name, found)

    def pytorch_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return those ranks under which ``torch.distributed.rpc`` has used this store."""
        return [
            rank
            for rank in sorted(ranks)
            if self._ask(lambda store, key=f"rpc_prefix_0/0/{rank}": store.check([key]))  # type: ignore[misc]
        ]

    def _ask(self, question: Callable[[Store], T]) -> T:
        try:
            if self._file is not None:
                self._file.check()
            return question(self.store)
        except NotImplementedError:
            raise
        except (RuntimeError, OSError) as error:
            raise StoreLost(first_line(error)) from error


class _FileIdentity:
    """Detects that a file store's file, which only grows, was removed, replaced or emptied.

    It keeps the file open, so that its inode number cannot be used again.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._file = os.fstat(self._descriptor)
        self._end = self._end_of(self._file.st_size)

    @classmethod
    def of(cls, store: Store) -> _FileIdentity | None:
        return cls(store.path) if isinstance(store, FileStore) else None  # type: ignore[attr-defined]

    def check(self) -> None:
        found, size = os.stat(self._path), self._file.st_size
        if not os.path.samestat(found, self._file) or self._end_of(size) != self._end:
            raise StoreLost(f"{self._path} was replaced by another file, or emptied")
        if found.st_size > size:
            self._file, self._end = found, self._end_of(found.st_size)

    def _end_of(self, size: int) -> bytes:
        """Return the last bytes of its first ``size`` bytes."""
        return os.pread(self._descriptor, _END_BYTES, max(0, size - _END_BYTES))[:size]


class _Line:
    """An idle connection to a TCP store; it breaks when the server's process ends."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), _LINE_SECONDS)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @classmethod
    def to(cls, store: Store) -> _Line | None:
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return cls(store.host, store.port) if isinstance(store, TCPStore) else None

    @property
    def broken(self) -> bool:
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._socket.close()


def first_line(error: BaseException) -> str:
    """Return the text of an error of PyTorch's, without the C++ stack trace."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__

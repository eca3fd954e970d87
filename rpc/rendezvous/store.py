"""A c10d store under a prefix, which says when it is lost and can then be opened again."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Final, TypeVar

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from rpc.errors import RendezvousError, RendezvousTimeoutError
from rpc.rendezvous.waiting import Backoff, OutOfTime, Waiting

__all__ = ["SharedStore", "StoreLost", "first_line"]

T = TypeVar("T")

_LONGEST_PAUSE_SECONDS: Final = 0.25


class StoreLost(Exception):
    """The store did not answer: its server is gone, or its file."""


class SharedStore:
    """A c10d store with what is needed to open it again, under a prefix of its own.

    Keep it for as long as others may need the store: with rank 0's goes the server. Used by one thread at
    a time.

    Attributes:
        store: the store itself, without the prefix; what a registered backend gets.
        description: names it in errors.
        master: the host that serves it; ``None`` for a file or a store in memory.
    """

    def __init__(
        self,
        opener: Callable[[Waiting], Store] | None,
        store: Store,
        description: str,
        master: str | None,
        prefix: str = "",
    ) -> None:
        self._opener = opener
        self.store = store
        self.description = description
        self.master = master
        self._prefix = prefix
        self._file = _FileIdentity.of(store)

    def under(self, prefix: str) -> SharedStore:
        """The same store with all keys under a prefix."""
        prefix = f"{self._prefix}{prefix}/"
        return SharedStore(self._opener, self.store, self.description, self.master, prefix)

    def reopen(self, waiting: Waiting, cause: StoreLost) -> None:
        """Open it anew after it was lost, waiting for its server as at first.

        Raises:
            RendezvousError: it was given as an object, and nothing is known of how to open it.
        """
        if self._opener is None:
            raise RendezvousError(
                f"{self.description} failed in the middle of the rendezvous: {cause}. It was passed as an "
                f"object, so that it cannot be opened again; is the process that serves it gone?"
            ) from cause
        self.store = self._opener(waiting)
        self._file = _FileIdentity.of(self.store)

    def outlast(self, waiting: Waiting, work: Callable[[], T]) -> T:
        """Run ``work``, and once more whenever the store was lost on the way and is open again.

        Raises:
            RendezvousTimeoutError: it was lost again and again until the deadline; says how the last time.
            RendezvousError: as ``reopen``.
        """
        backoff = Backoff(waiting, _LONGEST_PAUSE_SECONDS)
        while True:
            try:
                return work()
            except StoreLost as lost:
                # The server of a rank 0 that is just leaving, most likely: the next one's is to come.
                self.reopen(waiting, lost)
                try:
                    backoff.pause()
                except OutOfTime:
                    raise RendezvousTimeoutError(
                        f"{self.description} was opened again each time that it failed, until "
                        f"{waiting.timeout:g} s were over. The last time it said: {lost}"
                    ) from lost

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns the sum."""
        return int(self._ask(lambda store: store.add(self._prefix + key, amount)))

    def set(self, key: str, value: bytes) -> None:
        """Set a value, whatever was there."""
        self._ask(lambda store: store.set(self._prefix + key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes | None:
        """The value; None if there is none. Never waits for one."""

        def look(store: Store) -> bytes | None:
            name = self._prefix + key
            return store.get(name) if store.check([name]) else None

        return self._ask(look)

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return bool(self._ask(lambda store: store.check([self._prefix + key])))

    def counter(self, key: str) -> int:
        """What ``add`` has made of a counter so far."""
        return int(self.get(key) or 0)

    def swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set a value if it is still ``expected`` (empty: there is none); returns what it is afterwards."""
        name = self._prefix + key
        return self._ask(lambda store: store.compare_set(name, expected, desired))  # type: ignore[arg-type]

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
    """Notices that a store's file was removed or replaced, which a ``FileStore`` does not.

    It keeps the file open, so that its number cannot pass to another.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        self._file = os.fstat(descriptor)

    @classmethod
    def of(cls, store: Store) -> _FileIdentity | None:
        return cls(store.path) if isinstance(store, FileStore) else None  # type: ignore[attr-defined]

    def check(self) -> None:
        if not os.path.samestat(os.stat(self._path), self._file):
            raise StoreLost(f"{self._path} was replaced by another file")


def first_line(error: BaseException) -> str:
    """What an error of PyTorch's says, without the C++ stack below it."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__

"""The object of a remote reference on its owner: already there, or still being created."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rpc.agent.border import Work
from rpc.errors import RemoteError, RpcTimeoutError
from rpc.group.peer import Peer
from rpc.runtime.blocking import INFINITE, check_may_block, wait_for
from rpc.serialization.exception_state import to_keep, twin
from rpc.serialization.failures import text_of
from rref.turns import Turns

__all__ = ["Fetch", "Value"]

Fetch = tuple[Peer, int]
"""The peer that fetches the object, and the id of its call."""

T = TypeVar("T")


class Value:
    """The object of a remote reference, on its owner. From any thread.

    ======  =========================  ========================  ======================
    state   a fetch                    a request that uses it    becomes
    ======  =========================  ========================  ======================
    making  is parked                  waits                     made (by ``set``)
                                                                 failed (by ``fail``)
    made    is answered at once        runs at once
    failed  is answered by the error   is answered by the error
    ======  =========================  ========================  ======================

    Waiting requests are started by the thread that sets the value, and parked fetches are returned to it. No
    lock is taken: a waiter is first entered in a list; if the state has changed by then, the one of the two
    threads that takes the entry out again continues with it.

    Args:
        turns: the turns of requests that call a method of the object, if their number is limited.

    Attributes:
        turns: as given.
        creation: the creator, and the id of its call; None if the object was not created by a call.
        is_ready: whether the object is set, or creating it failed.
        content: the object, which may still be being computed; see ``get``.
        error: the error of creating the object, or None.
    """

    __slots__ = ("_made", "_parked", "_waiting", "content", "creation", "error", "is_ready", "turns")

    def __init__(self, turns: Turns | None = None) -> None:
        self.turns = turns
        self.creation: tuple[Peer, int] | None = None
        self.is_ready = False
        self.content: Any = None
        self.error: BaseException | None = None
        self._made: Work | None = None
        self._waiting: list[Callable[[], object]] = []
        self._parked: list[Fetch] = []

    @classmethod
    def of(cls, content: Any, made: Work | None = None) -> Value:
        """Return a value that is set already; ``made`` is as for ``set``."""
        value = cls()
        value.content, value._made = content, made
        value.is_ready = True
        return value

    @property
    def type_name(self) -> str:
        """The object's type, of a tensor with dtype and shape; "" until it is made."""
        content = self.content
        if content is None:
            return ""
        if type(content) is torch.Tensor:
            return f"{str(content.dtype).removeprefix('torch.')}{list(content.shape)}"
        return type(content).__qualname__

    @property
    def tensor_bytes(self) -> int:
        """The size in bytes of the object, if it is a tensor; otherwise 0."""
        content = self.content
        return content.numel() * content.element_size() if type(content) is torch.Tensor else 0

    def set(self, content: Any, made: Work | None = None) -> list[Fetch]:
        """Set the object. Returns the parked fetches, for the caller to answer.

        Args:
            content: the object.
            made: the work that produces it.
        """
        self._made = made
        return self._finish(content, None)

    def fail(self, error: BaseException) -> list[Fetch]:
        """Set the error of creating the object, which all requests for it get. Returns the parked fetches."""
        return self._finish(None, to_keep(error))

    def _finish(self, content: Any, error: BaseException | None) -> list[Fetch]:
        if self.is_ready:  # it was failed when this worker left
            return []
        self.content, self.error = content, error
        self.is_ready = True
        if self.turns is not None:
            self.turns.open()
        for callback in _taken(self._waiting):
            callback()
        return _taken(self._parked)

    def park(self, fetch: Fetch) -> bool:
        """Leave a fetch to the thread that creates the object; false if it is there, or has failed."""
        self._parked.append(fetch)
        return not (self.is_ready and _took_back(self._parked, fetch))

    def when_ready(self, callback: Callable[[], object]) -> bool:
        """Return whether the object is there or has failed; if not, ``callback`` is called once it is."""
        self._waiting.append(callback)
        return self.is_ready and _took_back(self._waiting, callback)

    def get(self) -> Any:
        """Return the object, or raise the error of creating it. Only once it ``is_ready``. What this thread
        does later waits for the work that produces it.
        """
        if self.error is not None:
            raise twin(self.error)  # a copy: frames that it passes may hold the reference
        if self._made is not None:
            self._made.join(self.content)
        return self.content

    def wait(self, timeout: float, what: str) -> Any:
        """Wait for the object and return it.

        Args:
            timeout: timeout in seconds, 0 for no limit.
            what: description of the wait, for the error.

        Raises:
            RpcTimeoutError: the object was not there in time.
            RemoteError: creating it raised something other than an ``Exception``.
            Exception: the error of creating it.
        """
        if not self.is_ready:
            check_may_block()
            done = threading.Lock()
            done.acquire()
            ready = self.when_ready(done.release)
            began = time.monotonic()
            if not ready and not wait_for(done, began + timeout if timeout else INFINITE):
                waited = (time.monotonic() - began) * 1000
                raise RpcTimeoutError(f"RPC ran for more than its timeout: {what}, waited {waited:.0f} ms")
        if self.error is not None and not isinstance(self.error, Exception):
            # It was meant for the thread that created the object, and must not end this one.
            kind, said = type(self.error).__name__, text_of(self.error)
            raise RemoteError(f"making the object raised {kind}: {said}", kind) from self.error
        return self.get()


def _taken(entries: list[T]) -> list[T]:
    """Return all entries; each is given to only one thread."""
    taken: list[T] = []
    while entries:
        try:
            taken.append(entries.pop(0))
        except IndexError:  # another thread has taken the last one
            break
    return taken


def _took_back(entries: list[T], entry: T) -> bool:
    """Remove an entry from the list; false if another thread has taken it."""
    try:
        entries.remove(entry)
    except ValueError:
        return False
    return True

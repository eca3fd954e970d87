"""An object that lives on this worker and others refer to: there already, or still being made."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from rpc.agent.device_ports import Ready
from rpc.errors import RemoteError, RpcTimeoutError
from rpc.group.peer import Peer
from rpc.runtime.blocking import INFINITE, check_may_block, wait_for
from rpc.serialization.exception_state import twin
from rpc.serialization.failures import text_of
from rref.turns import Turns

__all__ = ["Fetch", "Value"]

Fetch = tuple[Peer, int]
"""Who asks for the object, and the id of the call by which."""

T = TypeVar("T")

_OWN_PACKAGES: Final = ("rpc.", "rref.")


class Value:
    """What a remote reference refers to, on its owner. From any thread.

    ======  =========================  ========================  ======================
    state   a fetch                    a request that uses it    becomes
    ======  =========================  ========================  ======================
    making  is parked                  waits                     made (by ``set``)
                                                                 failed (by ``fail``)
    made    is answered at once        runs at once
    failed  is answered by the error   is answered by the error
    ======  =========================  ========================  ======================

    Who waits is told on the thread that sets it, and parked fetches are handed to that thread. No lock is
    taken: who is to wait is entered in a list first; if the state has changed by then, it is up to who takes
    the entry out again, the one or the other, to go on with it.

    Args:
        turns: those of requests that call a method of the object, if not all may run at once.
    """

    __slots__ = ("_content", "_error", "_made", "_parked", "_ready", "_waiting", "turns")

    def __init__(self, turns: Turns | None = None) -> None:
        self.turns = turns
        self._ready = False
        self._content: Any = None
        self._error: BaseException | None = None
        self._made: Ready | None = None
        self._waiting: list[Callable[[], object]] = []
        self._parked: list[Fetch] = []

    @classmethod
    def of(cls, content: Any, made: Ready | None = None) -> Value:
        """One that is there already; ``made`` is as for ``set``."""
        value = cls()
        value._content, value._made = content, made
        value._ready = True
        return value

    @property
    def is_ready(self) -> bool:
        """Whether it is set."""
        return self._ready

    @property
    def error(self) -> BaseException | None:
        """The error of making the object, once there is one."""
        return self._error

    @property
    def content(self) -> Any:
        """The object, whose tensors on devices may still be being computed; see ``get``."""
        return self._content

    @property
    def type_name(self) -> str:
        """The object's type, of a tensor with dtype and shape; "" until it is made."""
        content = self._content
        if content is None:
            return ""
        if type(content) is torch.Tensor:
            return f"{str(content.dtype).removeprefix('torch.')}{list(content.shape)}"
        return type(content).__qualname__

    def set(self, content: Any, made: Ready | None = None) -> list[Fetch]:
        """The object is there. Returns the fetches that were parked, for the caller to answer.

        Args:
            content: the object.
            made: the work on devices that makes it.
        """
        self._made = made
        return self._finish(content, None)

    def fail(self, error: BaseException) -> list[Fetch]:
        """Making the object failed: whoever asks for it gets ``error``. Returns the parked fetches."""
        _let_go(error)
        return self._finish(None, error)

    def _finish(self, content: Any, error: BaseException | None) -> list[Fetch]:
        if self._ready:  # it failed when this worker left
            return []
        self._content, self._error = content, error
        self._ready = True
        if self.turns is not None:
            self.turns.open()
        for callback in _taken(self._waiting):
            callback()
        return _taken(self._parked)

    def park(self, fetch: Fetch) -> bool:
        """Leave a fetch to whoever makes the object; false if it is there, or failed."""
        self._parked.append(fetch)
        return not (self._ready and _took_back(self._parked, fetch))

    def when_ready(self, callback: Callable[[], object]) -> bool:
        """Whether the object is there or failed; if not, ``callback`` is called once it is."""
        self._waiting.append(callback)
        return self._ready and _took_back(self._waiting, callback)

    def get(self) -> Any:
        """The object; raises the error of making it. Only once it ``is_ready``. Current streams of devices
        wait for the work that makes it.
        """
        if self._error is not None:
            raise twin(self._error)  # frames that it passes may hold the reference, and are not kept with it
        if self._made is not None:
            self._made.join()
        return self._content

    def wait(self, timeout: float, what: str) -> Any:
        """Wait for the object and return it.

        Args:
            timeout: seconds, 0 for no limit.
            what: what is waited for, for the error.

        Raises:
            RpcTimeoutError: it is not there in time.
            RemoteError: making it raised what is no ``Exception``.
            Exception: the error of making it.
        """
        if not self._ready:
            check_may_block()
            done = threading.Lock()
            done.acquire()
            ready = self.when_ready(done.release)
            began = time.monotonic()
            if not ready and not wait_for(done, began + timeout if timeout else INFINITE):
                waited = (time.monotonic() - began) * 1000
                raise RpcTimeoutError(f"RPC ran for more than its timeout: {what}, waited {waited:.0f} ms")
        if self._error is not None and not isinstance(self._error, Exception):
            # It was about the thread that made the object, and is not to end this one.
            kind, said = type(self._error).__name__, text_of(self._error)
            raise RemoteError(f"making the object raised {kind}: {said}", kind) from self._error
        return self.get()


def _taken(entries: list[T]) -> list[T]:
    """All entries, each of which only one thread gets."""
    taken: list[T] = []
    with contextlib.suppress(IndexError):
        while True:
            taken.append(entries.pop(0))
    return taken


def _took_back(entries: list[T], entry: T) -> bool:
    """Whether nobody has taken an entry, which is out of the list now."""
    try:
        entries.remove(entry)
    except ValueError:
        return False
    return True


def _let_go(error: BaseException) -> None:
    """Free what an error's frames hold: it may be kept for long, and frames of ours refer to its keeper."""
    chain: BaseException | None = error
    seen: set[int] = set()
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        trace = chain.__traceback__
        while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(_OWN_PACKAGES):
            trace = trace.tb_next
        chain.__traceback__ = trace
        traceback.clear_frames(trace)
        chain = chain.__cause__ or chain.__context__

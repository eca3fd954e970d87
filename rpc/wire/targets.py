"""Memory provided for messages before they arrive: ``Target``, whose buffers a message fills, and
``MergingTarget``, whose buffers it is merged into while it arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Final, Protocol

__all__ = ["MERGE_ALIGNMENT", "Merger", "MergingTarget", "Target"]

MERGE_ALIGNMENT: Final = 8
"""Alignment in bytes, in the message, of each part that is merged, if its sender has sent one buffer."""


class Movable(Protocol):
    """A message that arrives in a target: ``rpc.wire.reassembly.ArrivingMessage``."""

    buffers: list[memoryview]

    def move(self) -> None:
        """Detach from the target, with the target's lock held."""


class Target:
    """Memory provided for a message; a message whose target is taken back gets memory of its own.

    Threads write to the buffers within ``writing``, several at once to different places.

    Args:
        buffers: writable buffers, which the message's buffers after the first fill, one after the other;
            their total size is the same.

    Attributes:
        writers: the threads that are writing to the buffers, by identifier.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self.buffers = buffers
        self.is_taken_back = False
        self._changed = threading.Condition()
        self.writers: dict[int, None] = {}
        self._wanted = 0
        """Number of threads that take the buffers back."""
        self._message: Movable | None = None

    def is_of(self, buffers: list[memoryview]) -> bool:
        """Whether these are the buffers of the message that arrived for this target."""
        return self._message is not None and self._message.buffers is buffers

    def attach(self, message: Movable) -> None:
        """Attach a message that begins to arrive. If the target was just taken back, it gets memory of its
        own.
        """
        with self._changed:
            self._message = message
            if self.is_taken_back:
                message.move()

    def enter(self) -> None:
        """Record that the current thread is about to write to the buffers; it calls ``leave`` soon."""
        with self._changed:
            while self._wanted:
                self._changed.wait()
            self.writers[get_ident()] = None

    def leave(self) -> None:
        """Record that the current thread has stopped writing."""
        with self._changed:
            self.writers.pop(get_ident(), None)
            if self._wanted:
                self._changed.notify_all()

    def take_back(self) -> None:
        """Take the buffers back: when this returns, no thread writes to them any more, and the message has
        memory of its own, with all of it that has arrived. From any thread; takes as long as copying. If
        there is no memory for it, ``ProtocolError`` is raised, and nothing has changed.
        """
        with self._changed:
            self._wanted += 1
            try:
                while self.writers.keys() - {get_ident()}:  # a finalizer may run in a thread that is writing
                    self._changed.wait()
                if self._message is not None:
                    self._message.move()
                self.is_taken_back = True
            finally:
                self._wanted -= 1
                self._changed.notify_all()


class Merger:
    """Merges one message into memory: each byte once, even if parts of the message arrive several times.

    Args:
        merge: called with the offset of some bytes in the message, and with these bytes. Threads call it at
            once, for different bytes.

    Attributes:
        error: what ``merge`` has raised, or None. The memory is of no use then.
    """

    def __init__(self, merge: Callable[[int, memoryview], object]) -> None:
        self.error: Exception | None = None
        self._merge = merge
        self._merged: list[tuple[int, int]] = []

    @property
    def has_begun(self) -> bool:
        """Whether some bytes have been merged."""
        return bool(self._merged)

    def take(self, begin: int, data: memoryview) -> None:
        """Merge the bytes of the message from ``begin`` on, except those that have been merged."""
        end = begin + len(data)
        for first, last in sorted(self._merged):
            if first < end and last > begin:
                self._merge_new(begin, data[: max(0, first - begin)])
                data = data[last - begin :]
                begin = last
        self._merge_new(begin, data)

    def _merge_new(self, begin: int, data: memoryview) -> None:
        if not data or self.error is not None:
            return
        try:
            self._merge(begin, data)
        except Exception as error:  # the error of the transfer
            self.error = error
        self._merged.append((begin, begin + len(data)))


class MergingTarget(Target):
    """Memory that a message is merged into while it arrives.

    A message whose target is taken back before it begins has memory of its own; after that, the rest of it is
    dropped.
    """

    def __init__(self, buffers: Sequence[memoryview], merger: Merger) -> None:
        super().__init__(buffers)
        self._merger = merger
        self._of: list[memoryview] | None = None

    def is_of(self, buffers: list[memoryview]) -> bool:
        return self._of is buffers

    def begin(self, buffers: list[memoryview]) -> bool:
        """A message that has these buffers begins to arrive. Returns whether it is merged."""
        with self._changed:
            self._of = buffers
            return not self.is_taken_back

    def merge(self, begin: int, data: memoryview) -> None:
        """Merge a part of the message, unless the target was taken back."""
        self.enter()
        try:
            if not self.is_taken_back:
                self._merger.take(begin, data)
        finally:
            self.leave()

"""Copying into shared memory: short copies keep the interpreter, long ones let others run, and two threads
may share the longest.

One core does not always use all of the memory's bandwidth, so a second thread helps with large copies where
that is found to be faster. Both take one piece after the other: nobody waits for a helper that gets no core.
PyTorch's own threads are left alone: their number is the user's, and they do not survive a fork.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from statistics import median
from time import perf_counter
from typing import Any, Final

import numpy as np

from rpc.runtime.cpu_quota import usable_cores

__all__ = ["Copier", "Preference"]

_SHORT_BYTES: Final = 256 << 10
_LONG_BYTES: Final = 16 << 20
_PIECES: Final = 4
_PIECE_BYTES: Final = 4 << 20
_ALIGNMENT: Final = 4096

_LAST: Final = 5
_CLEARLY: Final = 0.9
_LOOK_AGAIN: Final = 16


class Preference:
    """Which of two ways to go, alone or with help, learned from how long each has taken. Pure.

    What counts is the median of the last few times, since a single one may be anything on a busy machine, and
    help must be clearly better. Now and then it chooses the other way: what was slower need not stay so.
    """

    def __init__(self) -> None:
        self._seconds: tuple[deque[float], deque[float]] = (deque(maxlen=_LAST), deque(maxlen=_LAST))
        self._turns = 0

    def choose(self) -> bool:
        """Whether to have help this time."""
        alone, helped = self._seconds
        if len(helped) < _LAST:
            return len(helped) < len(alone)
        self._turns += 1
        return (median(helped) < _CLEARLY * median(alone)) != (self._turns % _LOOK_AGAIN == 0)

    def learn(self, helped: bool, seconds: float) -> None:
        """Note how long it took."""
        self._seconds[helped].append(seconds)


class _Work:
    """One long copy, in pieces that two threads take as they come."""

    def __init__(self, buffer: memoryview, into: memoryview) -> None:
        self.buffers = buffer, into  # they stay as long as a helper may be at work
        self._source, self._target = _address(buffer), _address(into)
        self._size = len(buffer)
        piece = max(_PIECE_BYTES, self._size // _PIECES)
        self._piece = piece + -piece % _ALIGNMENT
        self._starts = iter(range(0, self._size, self._piece))
        self._helping = threading.Lock()

    def do(self) -> None:
        """Copy pieces while there are any."""
        for start in self._starts:
            length = min(self._piece, self._size - start)
            ctypes.memmove(self._target + start, self._source + start, length)

    def help(self) -> None:
        """The same, on the helper's thread."""
        with self._helping:
            self.do()

    def finish(self) -> None:
        """When no piece is left: wait for the one that a helper is still at, if there is one."""
        with self._helping:
            pass

    def give_up(self) -> None:
        """Begin no more pieces."""
        for _ in self._starts:
            pass


class Copier:
    """Copies buffers, from any thread; one at a time gets help.

    Args:
        cores: how many this process may run on.
    """

    def __init__(self, cores: int | None = None) -> None:
        self._cores = usable_cores() if cores is None else cores
        self._preferences: dict[int, Preference] = {}
        self._in_use = threading.Lock()
        self._helper: threading.Thread | None = None
        self._wake = threading.Semaphore(0)
        self._work: _Work | None = None
        self._closed = False

    def copy(self, buffer: Any, into: memoryview) -> None:
        """Copy a buffer's bytes over another buffer of the same length."""
        size = len(buffer)
        if size <= _SHORT_BYTES:
            into[:] = buffer
        elif size < _LONG_BYTES or self._cores < 2 or not self._in_use.acquire(blocking=False):
            ctypes.memmove(_address(into), _address(buffer), size)
        else:
            try:
                self._copy_long(buffer, into)
            finally:
                self._in_use.release()

    def _copy_long(self, buffer: memoryview, into: memoryview) -> None:
        preference = self._preferences.setdefault(len(buffer).bit_length(), Preference())
        helped = preference.choose() and self._has_helper()
        begin = perf_counter()
        if helped:
            self._copy_together(_Work(buffer, into))
        else:
            ctypes.memmove(_address(into), _address(buffer), len(buffer))
        preference.learn(helped, perf_counter() - begin)

    def _copy_together(self, work: _Work) -> None:
        self._work = work
        self._wake.release()
        try:
            work.do()
        finally:
            self._work = None
            work.give_up()
            work.finish()

    def _has_helper(self) -> bool:
        if self._helper is None and not self._closed:
            self._helper = threading.Thread(target=self._help, name="farcall-copier", daemon=True)
            try:
                self._helper.start()
            except RuntimeError:  # the system gives no more threads
                self._cores = 1
                self._helper = None
        return self._helper is not None

    def _help(self) -> None:
        while True:
            self._wake.acquire()
            if self._closed:
                return
            work = self._work
            if work is not None:
                work.help()
            del work  # an idle thread keeps nothing alive

    def close(self) -> None:
        """End the helper. What is copied after this is copied alone."""
        self._closed = True
        self._cores = 1
        self._wake.release()


def _address(buffer: memoryview) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address

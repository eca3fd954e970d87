"""Stacks of a process whose interpreter lock is held: written by ``faulthandler``, in C, on a signal.

The signal comes from a timer of the kernel that the observing thread keeps resetting: if that thread cannot
run for a while, the stacks are in the file before anybody asks, and stay there after ``kill -9``. The timer
signals the observing thread alone: a signal to the process could go to any thread, and end a system call
there that the program waits in. Only where there is no such timer, the reading command signals the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["FrozenStacks", "Stack", "read_stacks"]

FROZEN_SECONDS: Final = 3.0
"""After this time without a look, in seconds, the interpreter lock counts as held."""

_SIGNALS: Final = tuple(range(signal.SIGRTMAX - 3, signal.SIGRTMAX - 9, -1))
"""Signals to choose from: one that the program does not use."""

_CLOCK_MONOTONIC: Final = 1
_SIGEV_THREAD_ID: Final = 4
_MAX_BYTES: Final = 4 << 20

_THREAD: Final = re.compile(r"^(?:Current t|T)hread 0x([0-9a-fA-F]+)(?: \[(.*?)\])? .*:$")
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


class _Event(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_char * 64),
    )


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Interval(ctypes.Structure):
    _fields_ = (("interval", _Time), ("value", _Time))


class _Timer:
    """A timer of the kernel that signals the current thread. Raises ``OSError`` where there is none."""

    def __init__(self, number: int) -> None:
        try:
            library = ctypes.CDLL(None, use_errno=True)
            self._create, self._set = library.timer_create, library.timer_settime
            self._delete = library.timer_delete
        except (AttributeError, OSError):
            library = ctypes.CDLL("librt.so.1", use_errno=True)
            self._create, self._set = library.timer_create, library.timer_settime
            self._delete = library.timer_delete
        self._timer = ctypes.c_void_p()
        event = _Event(None, number, _SIGEV_THREAD_ID, threading.get_native_id(), b"")
        if self._create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._interval = _Interval()

    def set(self, seconds: float) -> None:
        """Send the signal after this time, unless this is called again before; 0: not at all."""
        whole = int(seconds)
        self._interval.value = _Time(whole, int((seconds - whole) * 1e9))
        self._set(self._timer, 0, ctypes.byref(self._interval), None)

    def delete(self) -> None:
        """There is no timer any more."""
        self._delete(self._timer)


class FrozenStacks:
    """Writes the stacks of this process to a file when its interpreter cannot. For one thread.

    Args:
        path: the file; a file there is replaced.

    Attributes:
        signal: number of the signal that has the stacks written; 0: the program uses all that there are.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self.path = path
        self._file = os.open(path, flags, 0o600)
        self._timer: _Timer | None = None
        self.signal = next((each for each in _SIGNALS if signal.getsignal(each) is signal.SIG_DFL), 0)
        if self.signal:
            faulthandler.register(self.signal, file=self._file, all_threads=True, chain=False)
            with contextlib.suppress(OSError, AttributeError):  # stacks are then written on request only
                self._timer = _Timer(self.signal)

    @property
    def has_timer(self) -> bool:
        """Whether stacks are written without anybody asking."""
        return self._timer is not None

    def reset(self) -> None:
        """The interpreter runs: have the stacks written if this is not called again in time."""
        if self._timer is not None:
            self._timer.set(FROZEN_SECONDS)

    def clear(self) -> None:
        """Forget stacks that were written."""
        with contextlib.suppress(OSError):
            if os.fstat(self._file).st_size:
                os.ftruncate(self._file, 0)

    def move(self, path: Path) -> None:
        """Give the file another name."""
        os.rename(self.path, path)
        self.path = path

    def close(self) -> None:
        """Write no more stacks; the file stays."""
        if self._timer is not None:
            self._timer.set(0)
            self._timer.delete()
        if self.signal:
            faulthandler.unregister(self.signal)
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of one thread.

    Attributes:
        thread: identifier of the thread.
        frames: function, file and line of each frame, the innermost first.
        name: name of the thread; "" if that is not known.
        holds_interpreter: it is known to hold the interpreter lock.
        native: the functions in C that it is in, the innermost first, as far as they are known.
    """

    thread: int
    frames: tuple[tuple[str, str, int], ...]
    name: str = ""
    holds_interpreter: bool = False
    native: tuple[str, ...] = ()


def read_stacks(text: str) -> Mapping[int, Stack]:
    """What ``faulthandler`` has written: of each thread its last stack. Anything else is skipped."""
    found: dict[int, Stack] = {}
    thread: int | None = None
    frames: list[tuple[str, str, int]] = []

    def end() -> None:
        if thread is not None and frames:
            found[thread] = Stack(thread, tuple(frames))

    for line in text[-_MAX_BYTES:].splitlines():
        begin = _THREAD.match(line)
        if begin is not None:
            end()
            thread, frames = int(begin.group(1), 16), []
        elif (frame := _FRAME.match(line)) is not None and thread is not None:
            file, number, function = frame.groups()
            frames.append((function, file, int(number) if number.isdigit() else 0))
    end()
    return found

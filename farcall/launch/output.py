"""The output of a launcher's workers: each line on the terminal, with its rank before it, and in files.

One thread reads all pipes. It writes whole lines at once, so that a reader of the launcher's own output sees
them immediately, and what is not a whole line after a short pause (``lines``). A process that ends may leave
children that keep its pipe open: what is in the pipe by then is read, and its end is not awaited.
"""

from __future__ import annotations

import os
import queue
import select
import selectors
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, Final

from farcall.launch.lines import Screen, Stream
from farcall.launch.terminal import say
from farcall.observe.reading.kept_output import LogTimes

__all__ = ["Output"]

_READ_BYTES: Final = 1 << 16

_PAUSE_SECONDS: Final = 0.1
"""Time in seconds after which text is written although its line has no end yet."""

_PIPE_BYTES: Final = 1 << 20
"""Maximum size in bytes of a pipe that a process sets without privileges, and so of what is left in one."""

_STREAMS: Final = {1: "standard output", 2: "standard error"}


class _Stream(Stream):
    """One stream of a process, written to the terminal and to a file. ``due`` is when an unfinished line is
    written.
    """

    def __init__(
        self, pipe: int, target: int, prefix: bytes, log: IO[bytes] | None, times: LogTimes | None
    ) -> None:
        super().__init__(prefix)
        self.pipe = pipe
        self.target = target
        self.log = log
        self.times = times
        self.due: float | None = None

    def take(self, read: bytes) -> list[bytes]:
        ended = super().take(read)
        if self.log is not None and ended:
            self._note(b"".join(ended))
        return ended

    def _note(self, text: bytes) -> None:
        """Write to the file, as long as that is possible: pipes must be read in any case."""
        assert self.log is not None
        assert self.times is not None
        try:
            self.times.note(os.fstat(self.log.fileno()).st_size)
            while text:
                text = text[self.log.write(text) :]
        except OSError as error:
            say(f"cannot write to {self.log.name} any more: {error.strerror}. The workers run on")
            self.log = None


class Output:
    """Reads what processes print. From any thread.

    Args:
        folder: folder for a file for each rank; None for no files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._orders: queue.SimpleQueue[_Stream | int | None] = queue.SimpleQueue()
        self._lost = set[int]()
        first, second = Screen(), Screen()
        self._screens = {1: first, 2: first if _is_one() else second}
        self.closed = threading.Event()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="farcall-output", daemon=True)
        self._thread.start()

    def log_file(self, rank: int) -> Path | None:
        """The file for a rank's output."""
        return None if self._folder is None else self._folder / f"rank{rank}.log"

    def follow(self, rank: int, process: subprocess.Popen[bytes]) -> tuple[int, ...]:
        """Start to read a process's streams; returns the argument for ``ended``."""
        file = self.log_file(rank)
        log = None if file is None else open(file, "ab", buffering=0)  # noqa: SIM115
        times = None if file is None else LogTimes(file)
        pipes = []
        for target, stream in ((1, process.stdout), (2, process.stderr)):
            assert stream is not None
            pipes.append(pipe := os.dup(stream.fileno()))
            stream.close()
            os.set_blocking(pipe, False)
            self._order(_Stream(pipe, target, b"[%d] " % rank, log, times))
        return tuple(pipes)

    def ended(self, pipes: tuple[int, ...]) -> None:
        """Read what a process that has ended has left in its pipes, and no more."""
        for pipe in pipes:
            self._order(pipe)

    def close(self) -> None:
        """End the reading, since all processes have ended. ``closed`` is set when everything has been
        written.
        """
        self._order(None)

    def _order(self, order: _Stream | int | None) -> None:
        self._orders.put(order)
        os.write(self._woken, b"\0")

    def _run(self) -> None:
        streams: dict[int, _Stream] = {}
        while True:
            for pipe in [key.fd for key, _ in self._selector.select(self._show_unfinished(streams))]:
                if pipe in streams and self._read(streams[pipe]) is None:
                    self._forget(streams, pipe)
                if pipe != self._wake:
                    continue
                os.read(self._wake, 1)
                order = self._orders.get()
                if order is None:
                    self.closed.set()
                    return
                if isinstance(order, _Stream):
                    streams[order.pipe] = order
                    self._selector.register(order.pipe, selectors.EVENT_READ)
                elif order in streams:
                    left = _PIPE_BYTES
                    while left > 0 and (read := self._read(streams[order])):
                        left -= read
                    self._forget(streams, order)

    def _read(self, stream: _Stream) -> int | None:
        """Write what has arrived; returns its length: 0 for nothing just now, None for the end."""
        try:
            read = os.read(stream.pipe, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not read:
            return None
        self._take(stream, read)
        return len(read)

    def _take(self, stream: _Stream, read: bytes) -> None:
        screen = self._screens[stream.target]
        self._write(stream.target, b"".join([screen.ended(stream, line) for line in stream.take(read)]))
        if not stream.rest:
            stream.due = None
        elif stream.due is None:
            stream.due = time.monotonic() + _PAUSE_SECONDS

    def _show_unfinished(self, streams: dict[int, _Stream]) -> float | None:
        """Write the unfinished lines that are due; returns the time in seconds until the next is, None for
        none.
        """
        now = time.monotonic()
        for stream in streams.values():
            if stream.due is not None and stream.due <= now:
                stream.due = None
                self._write(stream.target, self._screens[stream.target].paused(stream))
        return min((stream.due - now for stream in streams.values() if stream.due is not None), default=None)

    def _forget(self, streams: dict[int, _Stream], pipe: int) -> None:
        stream = streams.pop(pipe)
        self._selector.unregister(pipe)
        self._take(stream, b"")
        os.close(pipe)

    def _write(self, target: int, text: bytes) -> None:
        """Write, not through ``sys.stdout``, whose lock this thread may still hold when Python ends."""
        while text and target not in self._lost:
            try:
                text = text[os.write(target, text) :]
            except BlockingIOError:  # another program has made the launcher's terminal non-blocking
                select.select([], [target], [])
            except OSError as error:
                self._lost.add(target)
                say(f"cannot write to {_STREAMS[target]} any more: {error.strerror}. The workers run on")


def _is_one() -> bool:
    """Whether standard output and standard error are the same terminal or file."""
    try:
        return os.path.sameopenfile(1, 2)
    except OSError:  # one is closed
        return False

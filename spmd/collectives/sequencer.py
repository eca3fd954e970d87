"""The order of a group's collectives, and the threads that they run on.

All ranks must run a group's collectives in the same order, so each group has a queue. One thread at a time
has the *turn*, and runs the first operation of the queue. A thread that waits for an operation takes the turn
if it is free, so that a blocking collective needs no other thread; otherwise a thread of the group's own has
it, which is started when it is first needed. If the system gives no thread, the calling thread runs what is
queued. Callbacks of an operation run without the turn, and may make and await further collectives; while the
group's thread runs them, another takes its place.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from rpc.runtime.interrupts import protected
from spmd.collectives.work import GroupWork

__all__ = ["IDLE_SECONDS", "Sequencer"]

IDLE_SECONDS: Final = 5.0
"""Time in seconds without work after which the thread ends; the next operation starts another."""


class Sequencer:
    """Runs a group's operations, one after the other. From any thread.

    Args:
        name: name of its thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: deque[GroupWork] = deque()
        self._turn = threading.Lock()
        self._wanted = threading.Condition()
        self._is_wanted = False
        self._idle = 0

    def submit(self, operation: GroupWork) -> None:
        """Run an operation after all earlier ones, soon, on another thread if no waiting thread helps."""
        self._queue.append(operation)
        if not self._is_served():
            self.help(None)

    def run(self, operation: GroupWork) -> None:
        """Run an operation after all earlier ones, on this thread, unless another has the turn."""
        self._queue.append(operation)
        self.help(operation)

    @protected
    def help(self, operation: GroupWork | None) -> None:
        """Run what is queued, up to an operation or to the end. Returns early if another thread has the turn:
        that one, or the group's own, will run the rest.
        """
        # A thread that does not get the turn has queued its operation before; one that gives it up checks the
        # queue after.
        try:
            while self._queue and not (operation is not None and operation.done):
                if not self._turn.acquire(blocking=False):
                    break
                ended: GroupWork | None = None
                try:
                    while self._queue and not (operation is not None and operation.done):
                        ended = self._queue.popleft()
                        ended.run()
                        if ended.has_callbacks:
                            break
                finally:
                    self._turn.release()
                    if ended is not None and ended.has_callbacks:
                        self._is_served()
                        ended.call_back()
        finally:
            is_served = self._is_served()
        if not is_served:
            self.help(None)

    def _is_served(self) -> bool:
        """Whether another thread runs what is queued, if anything is; one is started if necessary. False if
        the system gives none.
        """
        return not self._queue or self._turn.locked() or self._want_thread()

    @protected
    def _want_thread(self) -> bool:
        """Have the group's thread take the turn, or start it; false if the system gives no thread."""
        with self._wanted:
            if self._is_wanted:
                return True  # one is about to start
            self._is_wanted = True
            if self._idle:
                self._wanted.notify()
                return True
        try:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        except BaseException as error:
            self._is_wanted = False
            if isinstance(error, RuntimeError | MemoryError):
                return False
            raise
        return True

    def _serve(self) -> None:
        while True:
            with self._wanted:
                self._idle += 1
                is_wanted = self._wanted.wait_for(lambda: self._is_wanted, IDLE_SECONDS)
                self._idle -= 1
                if not is_wanted:
                    return
                self._is_wanted = False
            self.help(None)

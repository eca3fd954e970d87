"""Counts the operations under way on an agent, whose end ``departure`` waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rpc.runtime.executor import Executor
from rpc.runtime.mailbox import Counter, Mailbox

__all__ = ["Activity"]

Count = Callable[[], int]


class Activity:
    """The operations under way on an agent; notifies its listener when there may be none. From any thread.

    Everything in flight between two workers is under way at its sender: a call until it is answered, a
    control message until it is acknowledged.

    Attributes:
        postponed: requests without a task that are still to be run or answered.
        listener: called when an operation has ended; None if there is no listener.
        inquiries: requests that only asked for the state of a wait.
    """

    def __init__(self, mailbox: Mailbox, executor: Executor) -> None:
        self.postponed = Counter()
        self.listener: Callable[[], object] | None = None
        self.inquiries = 0
        self._lock = threading.Lock()
        self._seen = 0
        self._mailbox = mailbox
        self._executor = executor
        self._parts: list[tuple[Count, Count]] = []
        self._requests: Count = int
        mailbox.when_emptied(self._look)

    def add(self, under_way: Count, begun: Count) -> None:
        """Add another part's number of operations under way, and the number that have ever begun."""
        self._parts.append((under_way, begun))

    def serve(self, requests: Count) -> None:
        """Add a count of requests of other workers that have ever begun here; see ``serving``."""
        self._requests = requests
        self.add(int, requests)

    def inquired(self) -> None:
        """Count a request that only asks for the state of a wait."""
        with self._lock:
            self.inquiries += 1

    def begun(self) -> int:
        """Number of operations that have ever begun."""
        return sum(begun() for _, begun in self._parts)

    def under_way(self) -> int:
        """Number of operations under way: calls and requests not answered yet, tasks, callbacks, control
        messages not acknowledged.
        """
        # In this order: calls and postponed requests become tasks, and tasks leave things in the mailbox.
        count = sum(under_way() for under_way, _ in self._parts) + self.postponed.value
        return count + self._executor.active() + self._mailbox.pending()

    def serving(self, waiting: int = 0) -> bool:
        """Whether this worker serves others: it runs a request, or has since the last call of this.

        Args:
            waiting: number of its tasks that only wait.
        """
        before, self._seen = self._seen, self._requests() - self.inquiries
        return before != self._seen or self._executor.active() > waiting

    def listen(self, listener: Callable[[], object] | None) -> None:
        """Have ``listener`` called whenever an operation may have ended, from now on; None to stop. On the
        loop's thread, where it is called as well.
        """
        if listener == self.listener:
            return
        self.listener = listener
        self._executor.when_idle(None if listener is None else self.ended)
        self.ended()  # reports those that ended before there was a listener

    def ended(self) -> None:
        """Notify the listener that an operation has ended: this worker may have become idle."""
        if self.listener is not None:
            self._mailbox.call(self._look)

    def postponed_ended(self) -> None:
        """Note that a postponed request has become a task, or was answered."""
        self.postponed.end()
        self.ended()

    def _look(self) -> None:
        if self.listener is not None:
            self.listener()

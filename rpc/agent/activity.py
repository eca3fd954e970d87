"""How much is under way on an agent: what ``departure`` waits for the end of."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rpc.runtime.executor import Executor
from rpc.runtime.mailbox import Counter, Mailbox

__all__ = ["Activity"]

Count = Callable[[], int]


class Activity:
    """How much is under way on an agent; notifies its listener when that may be nothing. From any thread.

    Nothing can be on its way between two workers that is not under way at its sender: a call is until it is
    answered, a control message until it is acknowledged.

    Attributes:
        postponed: requests that no task works on, but which are still to be run or answered.
        listener: called when something ended; None while it interests nobody.
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
        """Count what another part of the agent has under way, and how much it has ever begun."""
        self._parts.append((under_way, begun))

    def serve(self, requests: Count) -> None:
        """Count how many requests of others have ever begun here; see ``serving``."""
        self._requests = requests
        self.add(int, requests)

    def inquired(self) -> None:
        """A request has come that only asks for the state of a wait."""
        with self._lock:
            self.inquiries += 1

    def begun(self) -> int:
        """How much has ever begun."""
        return sum(begun() for _, begun in self._parts)

    def under_way(self) -> int:
        """How much is under way: calls and requests not answered yet, tasks, callbacks, control messages not
        acknowledged.
        """
        # In this order: calls and postponed requests become tasks, and tasks leave things in the mailbox.
        count = sum(under_way() for under_way, _ in self._parts) + self.postponed.value
        return count + self._executor.active() + self._mailbox.pending()

    def serving(self, waiting: int = 0) -> bool:
        """Whether this worker serves others: it runs something for them, or has since this was asked last.

        Args:
            waiting: so many of the tasks that it runs only wait.
        """
        before, self._seen = self._seen, self._requests() - self.inquiries
        return before != self._seen or self._executor.active() > waiting

    def listen(self, listener: Callable[[], object] | None) -> None:
        """On the loop's thread: have ``listener`` called there whenever something may have ended, from now
        on, or nobody any longer. (Only then is it worth the time to say so.)
        """
        if listener == self.listener:
            return
        self.listener = listener
        self._executor.when_idle(None if listener is None else self.ended)
        self.ended()  # what has ended since it was last counted could not say so

    def ended(self) -> None:
        """Something ended: this worker may have become idle."""
        if self.listener is not None:
            self._mailbox.call(self._look)

    def _look(self) -> None:
        if self.listener is not None:
            self.listener()

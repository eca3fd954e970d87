"""How much is under way on an agent, and who is told when that may have become nothing."""

from __future__ import annotations

from collections.abc import Callable

from rpc.runtime.executor import Executor
from rpc.runtime.mailbox import Counter, Mailbox

__all__ = ["Activity"]

Count = Callable[[], int]


class Activity:
    """Counts what is under way. From any thread.

    Nothing can be on its way between two workers that is not under way at its sender: a call is until it is
    answered, a control message until it is acknowledged.

    Attributes:
        postponed: requests that no task works on, but which are still to be run or answered.
        listener: who is told; None while it interests nobody.
    """

    def __init__(self, mailbox: Mailbox, executor: Executor) -> None:
        self._mailbox = mailbox
        self._executor = executor
        self.postponed = Counter()
        self._parts_under_way: Count = int
        self._parts_begun: Count = int
        self.listener: Callable[[], object] | None = None
        mailbox.when_emptied(self._look)

    def count(self, *, under_way: Count, begun: Count) -> None:
        """What the agent's other parts have under way, and how much has ever begun there."""
        self._parts_under_way, self._parts_begun = under_way, begun

    def under_way(self) -> int:
        """How much is under way: calls and requests not answered yet, tasks, callbacks, control messages not
        acknowledged.
        """
        # In this order: calls and postponed requests become tasks, and tasks leave things in the mailbox.
        count = self._parts_under_way() + self.postponed.value
        return count + self._executor.active() + self._mailbox.pending()

    def begun(self) -> int:
        """How many calls, requests and control messages have ever begun here: grows with each."""
        return self._parts_begun()

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

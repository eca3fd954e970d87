"""A thread's turn at reading a connection, and how the reply that it waits for becomes its own."""

from __future__ import annotations

from collections.abc import Sized
from threading import get_ident
from typing import Any, Protocol

from rpc.transport import syscalls
from rpc.transport.inline_read.role import Turn
from rpc.wire.frames import Frame

__all__ = ["AwaitedReply", "ThreadTurn"]


class AwaitedReply(Protocol):
    """A call that a thread waits for."""

    call_id: int
    outcome: Any
    """None until the reply is here or the call has ended otherwise."""

    def take_in(self, frames: list[Frame]) -> bool:
        """Take in what has come: the reply, which becomes the outcome, and frames that any thread may take.

        It may be repeated, by the loop, too. False if the loop must have these frames; then none is taken.
        """

    def takes(self, header: dict[str, Any]) -> bool:
        """Whether a reply with this header may be taken by the thread that waits for it."""

    def look(self, frame: Frame, taken: Sized) -> Frame | None:
        """The reply that a frame stands for, whose memory lies elsewhere; None if it stands for none.

        Args:
            taken: not empty from when the reply is taken; until then, it may be looked at again.
        """


class ThreadTurn(Turn):
    """A turn of a thread, with the socket to receive from: none any more when it has ended.

    Attributes:
        offered: the call that the thread waits for and its reply, which has been looked at.
        taken: not empty once that reply is the thread's.
    """

    __slots__ = ("offered", "socket", "taken")

    def __init__(self, stands_by: bool, descriptor: int) -> None:
        self.thread = get_ident()
        self.stands_by = stands_by
        self.unread = []
        self.socket = syscalls.Number(descriptor)
        self.offered: tuple[AwaitedReply, Frame] | None = None
        self.taken: list[int] = []

    def take(self, call: AwaitedReply, reply: Frame) -> None:
        """Take a reply that was looked at, unless the loop has taken what it came in."""
        self.offered = call, reply
        try:
            self.taken.extend(map(list.pop, (self.unread,)))
        except IndexError:
            return
        self.deliver()

    def deliver(self) -> None:
        """See to it that what was taken is where it belongs."""
        offered = self.offered
        if self.taken and offered is not None:
            call, reply = offered
            call.outcome = reply
            self.offered = None  # or they would keep each other

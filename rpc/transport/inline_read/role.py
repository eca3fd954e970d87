"""Who reads a connection: the loop, or a thread that waits for what will come on it. Pure.

Usually the loop reads. A thread that waits for a reply, or has nothing to do but to wait for the next
request, saves two hand-overs if it reads the socket itself. One at a time may: who has the *role*. A thread
has it for one *turn*, while it waits in the kernel, and gives it up before it does anything else: nobody has
it who runs code of the user's, or waits for anything but the socket.

A thread takes in nothing but the one frame that it waits for. Whatever else has come it leaves where it is,
received but not looked at, and the role passes to the loop, which goes on from there. So frames are taken in
in the order in which they came, and all that the protocol has to decide is decided on the loop's thread.

An exception may hit a thread between any two steps, since Ctrl-C can come after any call; and a signal
handler, or a finalizer, may run there that makes a call itself. So each step is one operation that either has
happened or has not, and may be repeated; and who calls in the middle of a turn of its own thread ends it.

Reading in vain costs more than it saves: where other frames come between, as when many calls are under way,
it is better to leave the reading to the loop for a while. ``worth`` says when to try again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Final

from rpc.transport.inline_read.trial import Trial

__all__ = ["LOOP", "ReaderRole", "Turn"]


class Turn:
    """One turn at reading; a new one each time, so that none is taken for a later one.

    Attributes:
        thread: whose turn it is, by its identifier.
        stands_by: the thread has nothing else to do, and gives way to who waits for a reply.
        unread: how much it has received, and not taken: one number for each time.
    """

    __slots__ = ("stands_by", "thread", "unread")

    def __init__(self, thread: int, stands_by: bool) -> None:
        self.thread = thread
        self.stands_by = stands_by
        self.unread: list[int] = []


LOOP: Final = Turn(0, stands_by=False)
"""All turns of the loop's thread."""

_HOLDER: Final = 0


class ReaderRole:
    """The role of one connection's reader. From any thread.

    Attributes:
        holder: a function that returns the turn of who has the role, or None.
        offer: a function that gives the role to a turn if nobody has it, and returns who has it then.

    Taking it is one operation of a dictionary. Elsewhere there is no call between the look at who has it and
    the change: only at calls does Python let other threads or signal handlers come between.

    Example::

        if role.take(turn):
            ...
            role.leave(turn)
    """

    __slots__ = ("_held", "holder", "offer", "worth")

    def __init__(self) -> None:
        self._held: dict[int, Turn] = {}
        self.holder: Callable[[], Turn | None] = partial(self._held.get, _HOLDER)
        self.offer: Callable[[Turn], Turn] = partial(self._held.setdefault, _HOLDER)
        self.worth = Trial()
        """Whether threads should try to read."""

    def take(self, turn: Turn) -> bool:
        """Take the role if nobody has it; returns whether ``turn`` has it now."""
        return self.offer(turn) is turn

    def own_turn(self) -> Turn | None:
        """The current thread's turn, if it has one."""
        turn = self.holder()
        return turn if turn is not None and turn.thread == get_ident() else None

    def pass_to_loop(self, turn: Turn) -> bool:
        """On the loop's thread, asked by the thread whose turn it is; false if it has ended."""
        held = self._held
        try:
            if held[_HOLDER] is turn:
                held[_HOLDER] = LOOP
                return True
        except KeyError:
            pass
        return False

    def leave(self, turn: Turn) -> None:
        """Give the role up: by the thread whose turn it is, if it still is."""
        held = self._held
        try:
            if held[_HOLDER] is turn:
                held.pop(_HOLDER, None)
        except KeyError:
            return

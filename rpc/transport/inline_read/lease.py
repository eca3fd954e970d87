"""Who reads a connection: the loop, or a thread that waits for what will come on it. Pure.

Usually the loop reads. A thread that waits for a reply, or has nothing to do but to wait for the next
request, saves two hand-overs if it reads the socket itself. One at a time may: who has the *lease*. A thread
has it for one *turn*, while it waits in the kernel and takes in what has come, and gives it up before it does
anything else.

A turn may end at any point, and the loop goes on from there. That matters where a finalizer or a signal
handler that runs in the middle of a turn makes a blocking call itself: what it waits for could never be read
by the thread below it. So what a turn has received and not yet taken in is always to be found in the turn,
and each step is one operation of C code, which has happened or has not:

- ``unread`` gets the number of bytes received, within the C code that receives them;
- ``frames`` is set to the frames that these bytes are: from then on ``unread`` does not count;
- each frame is popped off ``frames`` before anything is done with it, and the loop pops all that are left.

What a turn leaves when it has ended is the loop's alone: until the loop has taken it over nobody reads, the
thread whose turn it was included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Final

from rpc.transport import syscalls
from rpc.wire.frames import Frame

__all__ = ["LOOP", "ReadLease", "Turn"]


class Turn:
    """One turn at reading; a new one each time, so that none is taken for a later one.

    Args:
        thread: whose turn it is, by its identifier.
        idle: the thread has nothing else to do, and gives way to one that waits for a reply.
        descriptor: where it receives from: none any more when the turn has ended.
        wake: ends the wait of the thread in the kernel.

    Attributes:
        left_to_loop: None until the turn has ended; then whether the loop is to go on with what is in it.
    """

    __slots__ = ("frames", "idle", "left_to_loop", "socket", "thread", "unread", "wake")

    def __init__(self, thread: int, idle: bool, descriptor: int, wake: Callable[[], object]) -> None:
        self.thread = thread
        self.idle = idle
        self.socket = syscalls.Number(descriptor)
        self.unread: list[int] = []
        self.frames: list[Frame] | None = None
        self.left_to_loop: bool | None = None
        self.wake = wake

    def has_leftovers(self) -> bool:
        """Whether there is anything that the turn has received and not taken in."""
        return any(count > 0 for count in self.unread) if self.frames is None else bool(self.frames)

    def take_frames(self) -> list[Frame]:
        """Remove what is left of the frames, and return it."""
        frames = self.frames or []
        taken = frames[:]
        frames.clear()
        return taken

    def release(self) -> None:
        """From any thread: what the thread waits for is here, or will not come."""
        if self.thread != get_ident():  # else it is just taking that in
            self.wake()


LOOP: Final = Turn(0, False, -1, int)
"""All turns of the loop's thread."""

_HOLDER: Final = 0


class ReadLease:
    """The lease of one connection. From any thread.

    Attributes:
        holder: a function that returns the turn of who has the lease, or None.
        offer: a function that gives the lease to a turn if nobody has it, and returns who has it then.

    Taking it is one operation of a dictionary. Elsewhere there is no call between the look at who has it and
    the change: only at calls does Python let other threads, finalizers or signal handlers come between.
    """

    __slots__ = ("_held", "holder", "offer")

    def __init__(self) -> None:
        self._held: dict[int, Turn] = {}
        self.holder: Callable[[], Turn | None] = partial(self._held.get, _HOLDER)
        self.offer: Callable[[Turn], Turn] = partial(self._held.setdefault, _HOLDER)

    def take(self, turn: Turn) -> bool:
        """Take the lease if nobody has it; returns whether ``turn`` has it now."""
        return self.offer(turn) is turn

    def own_turn(self) -> Turn | None:
        """The current thread's turn, if it has one: also one that has ended and waits for the loop."""
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
        """Give the lease up: by the thread whose turn it is, if it still is."""
        held = self._held
        try:
            if held[_HOLDER] is turn:
                held.pop(_HOLDER, None)
        except KeyError:
            return

"""Where an executor's idle thread waits for its next task itself: at a peer that may ask for more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rpc.runtime.executor import Task
from rpc.transport.inline_read.reading import DirectReading
from rpc.wire.frames import BARE_REQUEST, Frame, Kind

if TYPE_CHECKING:
    from rpc.group.peer import Peer

__all__ = ["Standby"]


class Standby:
    """Reads requests of one peer: the executor's ``Station``.

    Args:
        agent: of this worker: its dispatcher, its shared memory, its executor.
        peer: who asks.
        direct: how its connection is read.
    """

    __slots__ = ("_agent", "_direct", "_peer")

    def __init__(self, agent: Any, peer: Peer, direct: DirectReading) -> None:
        self._agent = agent
        self._peer = peer
        self._direct = direct

    def claim(self) -> bool:
        """Take the place for the current thread, which may have it already; false if it cannot have it."""
        direct = self._direct
        return direct.role.own_turn() is not None or direct.claim(stands_by=True) is not None

    def leave(self) -> None:
        """Give up the place."""
        self._direct.leave()

    def release(self) -> None:
        """From another thread: end the wait."""
        self._direct.release()

    def next_task(self, timeout: float | None) -> Task | None:
        """Having claimed the place: wait for a request, and give it up; None if anything else comes first."""
        return self._direct.next_request(timeout, self)

    def takes(self, frame: Frame) -> bool:
        """Whether a thread that stands by may take in a frame, or the message that it stands for."""
        kind, _, header, segments = frame
        if kind == Kind.CALL and not header:
            return True
        agent = self._agent
        if kind == Kind.IN_SEGMENT:
            if header or len(segments) != 1:
                return False
            if segments[0][:2] == BARE_REQUEST:
                return True
            outline = agent.shared_memory.outline(segments[0])
            if outline is None:
                return False
            kind, header = outline
        return bool(agent.dispatcher.is_for_any_thread(kind, header))

    def take(self, frames: list[Frame], *, busy: bool = False) -> Task | None:
        """Take frames in; returns what the thread has to do, if anything, and leaves the rest to others.

        Args:
            busy: the thread has something to do already.
        """
        peer, agent = self._peer, self._agent
        tasks: list[Task] = []
        for frame in frames:
            whole = agent.shared_memory.unwrap(peer, frame) if frame.kind == Kind.IN_SEGMENT else frame
            task = agent.dispatcher.taken_by_thread(peer, whole)
            if task is not None:
                tasks.append(task)
        mine = None if busy or not tasks else tasks.pop(0)
        if tasks:
            agent.executor.submit_batch(tasks)
        return mine

    def is_followed(self, frames: list[Frame]) -> bool:
        """Whether another frame most likely comes right behind these."""
        return frames[-1].kind in self._agent.dispatcher.followed

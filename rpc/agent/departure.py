"""Waiting for the end of all work, on all workers or here: the shell around ``termination``.

Everything except ``wait`` runs on the loop's thread. Idleness is checked when an operation has ended: a task,
a call, a request, or a control message that was acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Final

from rpc.agent.activity import Activity
from rpc.agent.hooks import Hooks
from rpc.errors import ProtocolError, RpcTimeoutError, WorkerLostError
from rpc.group.connections import Connections
from rpc.group.peer import Peer, PeerTable
from rpc.group.termination import (
    ActivityReport,
    CutOff,
    Failed,
    Leave,
    Quiescent,
    SendToWorker,
    Termination,
    Waits,
)
from rpc.group.workers import Member
from rpc.runtime import waits
from rpc.runtime.blocking import INFINITE, Event, wait_for_event
from rpc.runtime.interrupts import interruptible
from rpc.runtime.loop import LoopThread
from rpc.runtime.notices import Notices
from rpc.wire.frames import Frame, Kind, encode

__all__ = ["SHUT_DOWN", "Departure"]

logger = logging.getLogger(__name__)

ROUNDS: Final = 3
"""Number of rounds. The first ends when no call is under way anywhere, the second when all references are
released, the third when all workers have checked what was not released. Then all leave.
"""

SHUT_DOWN: Final = "it has shut down"
"""Reason that a worker gives to the others when its graceful shutdown ends."""

_CLOSED: Final = "another thread has ended the agent"


class Departure:
    """One agent's departure from its group.

    Args:
        describe: returns a description of the calls under way here.
    """

    def __init__(
        self,
        activity: Activity,
        peers: PeerTable,
        connections: Connections,
        loop_thread: LoopThread,
        hooks: Hooks,
        describe: Callable[[], str] = str,
    ) -> None:
        self._activity = activity
        self._describe = describe
        self._peers = peers
        self._connections = connections
        self._loop_thread = loop_thread
        self._termination: Termination | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._notices = Notices()
        self._notice: asyncio.TimerHandle | None = None
        self._waiting: Callable[[str | None], None] | None = None
        self._claimed = threading.Lock()
        self._is_closed = False
        self._expects_long = False
        self._told_of = ""
        hooks.awaited.append(self.awaited)
        hooks.closed.append(self._closed)

    def register(self, on: Callable[..., object]) -> None:
        """Register the handlers of its kinds of messages; ``on`` is ``Dispatcher.on``."""
        on(Kind.SHUTDOWN, self.received)

    def form(self, me: Member, members: Sequence[Member] | None) -> None:
        """Set the group's ``members``; None for a dynamic group, in which each worker leaves when its own
        work is done.
        """
        self._me = me
        self._termination = None if members is None else Termination(me, members, ROUNDS)

    @interruptible
    def wait_for_all(
        self, timeout: float, release: Iterable[Callable[[], object]], check: Iterable[Callable[[], object]]
    ) -> None:
        """Wait for the end of all work, with all ``ROUNDS``; see ``wait``, and ``Hooks`` for ``release`` and
        ``check``. If a check raises, the third round is waited for all the same.
        """
        self.wait(timeout)
        for give_back in release:
            give_back()
        self.wait(timeout)
        try:
            for look in check:
                look()
        finally:
            self.wait(timeout)

    def wait(self, timeout: float) -> None:
        """Wait for the end of a round (in a dynamic group: of this worker's own work). A signal handler may
        interrupt it.

        ``RpcTimeoutError`` if it takes more than ``timeout`` seconds (0 for no limit), or if another thread
        has ended the agent; the text names the workers that are not in shutdown, or still busy.
        """
        ended = Event()
        failure: list[str | None] = [None]

        def end(reason: str | None) -> None:
            failure[0] = reason
            ended.set()

        try:
            self._loop_thread.call(self.begin, end, timeout)
        except RuntimeError:
            if not self._is_closed:
                raise
            end(_CLOSED)
        with waits.waiting("shutdown"):
            wait_for_event(ended, INFINITE)
        if failure[0] is not None:
            raise RpcTimeoutError(
                f"worker '{self._me.name}' has left without waiting any longer: {failure[0]}"
            )

    def begin(self, end: Callable[[str | None], None], timeout: float) -> None:
        """Enter a round like ``wait``, and have ``end`` called when it is over: with None, or with the reason
        why this worker has left without waiting any longer.
        """
        self._waiting = end
        self._await_notice()
        if self._is_closed:
            end(_CLOSED)
        elif self._termination is not None:
            self._act(self._termination.enter(monotonic(), self._report(), timeout))
            self._watch_over_all()
        else:
            self._activity.listen(self.look)
            self._cancel_timer()  # of the previous round
            if timeout:
                self._timer = self._loop_thread.loop.call_later(timeout, self._expire)
            self.look()

    @property
    def under_way(self) -> bool:
        """Whether a thread waits here. From any thread."""
        return self._waiting is not None

    def look(self) -> None:
        """Check whether this worker has become idle."""
        if self._termination is not None:
            self._act(self._termination.became_idle(self._report()))
        elif self._waiting is not None and not self._report().active:
            self._end(None)

    def received(self, peer: Peer, frame: Frame) -> None:
        """Handle a frame of kind ``SHUTDOWN``."""
        if self._termination is None:
            raise ProtocolError("a shutdown message in a dynamic group, whose members leave one by one")
        message = frame.header.get("message")
        self._act(self._termination.receive(peer.incarnation, message, monotonic(), self._report()))

    def worker_gone(self, peer: Peer) -> None:
        """Record that a worker is gone, for any reason."""
        if self._termination is not None:
            self._act(self._termination.lost(peer.incarnation, monotonic(), self._report()))
            self._watch_over_all()
        else:
            self.look()

    @property
    def leader(self) -> int | None:
        """Incarnation of the leader; None in a dynamic group."""
        return None if self._termination is None else self._termination.leader

    def awaited(self) -> list[Peer]:
        """Return the workers that this one waits for here: the leader for all others, the others for the
        leader.
        """
        if self._waiting is None or self.leader is None:
            return []
        if self.leader == self._me.incarnation:
            return self._peers.present()
        leader = self._peers.by_incarnation(self.leader)
        return [] if leader is None else [leader]

    @property
    def begun(self) -> bool:
        """Whether this worker's graceful shutdown has begun. From any thread."""
        return self._claimed.locked()

    def expect_long(self) -> None:
        """Have long waits logged at level DEBUG only, since they are usual for this worker."""
        self._expects_long = True

    def claim(self) -> bool:
        """Whether this call is the first to claim the wait."""
        return self._claimed.acquire(blocking=False)

    def _closed(self) -> None:
        """End the wait, on the closing thread. This sets a flag and then ends the wait, ``begin`` records the
        wait and then checks the flag: in either order, no thread waits for ever.
        """
        self._is_closed = True
        self._end(_CLOSED)

    def _await_notice(self) -> None:
        if self._notice is not None:
            self._notice.cancel()
        self._notices = Notices()
        self._notice = self._loop_thread.loop.call_at(self._loop_time(self._notices.next), self._give_notice)

    def _loop_time(self, at: float) -> float:
        return self._loop_thread.loop.time() + max(0.0, at - monotonic())

    def _give_notice(self) -> None:
        """Log which workers this one has waited for, after a long wait."""
        if self._waiting is None:
            return
        if self._notices.due():
            if self._termination is None:
                self._tell_of_waiting("its own work")
            else:
                self._act(self._termination.inquire(self._report()))
        self._notice = self._loop_thread.loop.call_at(self._loop_time(self._notices.next), self._give_notice)

    def _tell_of_waiting(self, for_whom: str) -> None:
        own = self._describe()
        # It is usual that a worker serves until the others leave as well.
        usual = self._expects_long or (self._activity.serving() and "not in shutdown" in for_whom)
        is_news = not usual and for_whom != self._told_of
        if is_news:
            self._told_of = for_whom
        logger.log(
            logging.WARNING if is_news else logging.DEBUG,
            "worker '%s' has waited in shutdown for %s: %s%s",
            self._me.name,
            self._notices.waited,
            for_whom,
            f". Here: {own}" if own else "",
        )

    def _watch_over_all(self) -> None:
        """Stay connected to all workers, as the leader: it must notice the death of workers it never talked
        to.
        """
        if self._waiting is not None and self.leader == self._me.incarnation:
            for peer in self._peers.present():
                self._peers.watch_over(peer)

    def _report(self) -> ActivityReport:
        begun = self._activity.begun()  # first: what begins later is then counted by one of them
        return ActivityReport(self._activity.under_way(), begun)

    def _act(self, actions: Sequence[Any]) -> None:
        find = self._peers.by_incarnation
        for action in actions:
            match action:
                case SendToWorker(incarnation, message):
                    peer = find(incarnation)
                    if peer is not None:
                        _send(peer, message)
                case CutOff(incarnation):
                    peer = find(incarnation)
                    if peer is not None:
                        self._connections.lose(peer, "the worker that leads the shutdown found it gone")
                case Quiescent() | Leave():
                    self._end(None)
                case Failed(reason):
                    self._end(reason)
                case Waits(reason):
                    self._tell_of_waiting(reason)
        assert self._termination is not None
        self._activity.listen(self.look if self._termination.awaits_idleness else None)
        self._set_timer()

    def _expire(self) -> None:
        """Handle the timeout in a dynamic group."""
        self.look()  # there may have been no check since, if this process was stopped
        if self._waiting is not None:
            self._end(f"this worker still has {self._report().active} calls or tasks under way")

    def _end(self, reason: str | None) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting(reason)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self._cancel_timer()
        assert self._termination is not None
        due = self._termination.next_tick
        if due is not None:
            self._timer = self._loop_thread.loop.call_later(max(0.0, due - monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        assert self._termination is not None
        self._act(self._termination.tick(monotonic(), self._report()))


def _send(peer: Peer, message: list[Any]) -> None:
    buffers, size = encode(Kind.SHUTDOWN, 0, {"message": message}, ())
    with contextlib.suppress(WorkerLostError):  # ``worker_gone`` will follow
        peer.send(buffers, size, wait=False)

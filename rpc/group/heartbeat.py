"""Detects workers that are silent: the shell around ``liveness``.

There is one timer for all connections. Heartbeats are sent only if something is awaited from a worker or on
its way to it, and no messages arrive anyway. A worker that is asked answers as soon as one of its threads
reads: that needs neither its executor nor user code, but it needs the GIL. So before a worker on this host is
given up, the kernel is asked about its process: one that computes, or waits for a core, is busy and not gone,
however long it has held the GIL.

A worker may live and yet, against the protocol, acknowledge nothing. Callers wait while many messages are
kept for it, and it is lost when it has acknowledged none of them for ``lost_after`` seconds; but not if it
sends nothing else either while its process computes: then it is busy, as above.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from rpc.group.liveness import Liveness
from rpc.group.own_time import Neighbours
from rpc.group.peer import RESUMED, Peer
from rpc.runtime.process_signs import ProcessSigns, computes
from rpc.transport.session import MAX_UNACKNOWLEDGED
from rpc.wire.frames import Frame, Kind

__all__ = ["Heartbeat"]

logger = logging.getLogger(__name__)

_ANSWER: Final = 1
"""Codec of an ``ALIVE`` frame that asks for a heartbeat in return."""

_LOOK_SECONDS: Final = 2.5
"""Maximum interval in seconds between two checks; received messages are acknowledged then."""

_MOST_UNACKNOWLEDGED: Final = 4 * MAX_UNACKNOWLEDGED
"""Limit of unacknowledged messages at which a worker is lost at once; urgent messages exceed the normal
limit.
"""


class Heartbeat:
    """The heartbeats of one agent. ``received`` from any thread, everything else on the loop's.

    Args:
        peers: returns all workers.
        lose: called with a worker that is silent, and what is known about it.
        message_lost: called with the first chunk of each large message that was lost with a connection.
        greet_again: called with a worker that is silent and was only greeted.
        lost_after: time in seconds after which a silent worker is lost; 0 for never.
        own_time: the clock.
        neighbours: finds the processes of workers on this host.

    Attributes:
        interests: functions that return the workers from which something is awaited now.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        peers: Callable[[], Iterable[Peer]],
        lose: Callable[[Peer, str], object],
        message_lost: Callable[[Peer, bytes], object],
        greet_again: Callable[[Peer], object],
        lost_after: float,
        own_time: Callable[[], float],
        neighbours: Neighbours,
    ) -> None:
        self.interests: list[Callable[[], Iterable[Peer]]] = [
            lambda: [peer for peer in peers() if peer.session.sent]
        ]
        self._peers = peers
        self._message_lost = message_lost
        self._greet_again = greet_again
        self._loop = loop
        self._lose = lose
        self._lost_after = lost_after
        self._own_time = own_time
        self._neighbours = neighbours
        self._liveness = Liveness(lost_after)
        self._acknowledging = Liveness(lost_after)  # counts acknowledgements as heartbeats
        self._asked: dict[int, ProcessSigns | None] = {}
        """For each worker that was asked, the state of its process at that time."""
        self._asked_to_acknowledge: dict[int, tuple[int, ProcessSigns | None]] = {}
        """For each worker with too many kept messages, the number of heartbeats and the state of
        its process.
        """
        self._timer: asyncio.TimerHandle | None = None

    def register(self, on: Callable[..., object]) -> None:
        """Register the handlers of its kinds of messages; ``on`` is ``Dispatcher.on``."""
        on(Kind.ALIVE, self.received, any_thread=True)
        on(Kind.ARRIVED, self.arrived, any_thread=True)

    def begin(self) -> None:
        """Start checking periodically."""
        self._timer = self._loop.call_later(min(self._liveness.interval, _LOOK_SECONDS), self._look)

    def stop(self) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()

    def received(self, peer: Peer, frame: Frame) -> None:
        """Handle a frame of kind ``ALIVE``."""
        peer.session.acknowledged(frame.call_id)
        if frame.codec == _ANSWER:
            peer.send_heartbeat(0)
        elif frame.codec == RESUMED:
            for head in peer.session.take_lost():
                self._message_lost(peer, head)

    def arrived(self, peer: Peer, frame: Frame) -> None:
        """Handle a frame of kind ``ARRIVED``. From any thread."""
        peer.session.large.pop(frame.call_id, None)

    def _look(self) -> None:
        self.begin()
        for peer in self._peers():
            if peer.session.owes:
                peer.acknowledge()
        awaited = {peer.incarnation: peer for interest in self.interests for peer in interest()}
        signs = {
            incarnation: peer.session.heard
            for incarnation, peer in awaited.items()
            if peer.lost is None and not peer.is_self and peer.link.should_answer
        }
        ask, silent = self._liveness.look(self._own_time(), signs)
        self._asked = {each: seen for each, seen in self._asked.items() if each in signs}
        for incarnation in ask:
            peer = awaited[incarnation]
            if incarnation in self._asked:  # and it has still not answered
                self._neighbours.find(peer)
            self._asked[incarnation] = self._neighbours.signs(peer)
            if peer.connected:
                peer.send_heartbeat(_ANSWER)
            else:
                self._greet_again(peer)
        for incarnation in silent:
            self._is_silent(awaited[incarnation])
        self._look_at_full()

    def _look_at_full(self) -> None:
        """Ask the workers for which too many messages are kept to acknowledge."""
        there = (peer for peer in self._peers() if peer.lost is None)
        full = {peer.incarnation: peer for peer in there if peer.session.is_full()}
        signs = {each: peer.session.first for each, peer in full.items() if peer.link.should_answer}
        ask, silent = self._acknowledging.look(self._own_time(), signs)
        asked = self._asked_to_acknowledge
        self._asked_to_acknowledge = {each: seen for each, seen in asked.items() if each in signs}
        for incarnation in ask:
            peer = full[incarnation]
            self._asked_to_acknowledge[incarnation] = peer.session.heard, self._neighbours.signs(peer)
            peer.send_heartbeat(_ANSWER)
        for incarnation in silent:
            peer = full[incarnation]
            count, before = self._asked_to_acknowledge.get(incarnation, (0, None))
            if peer.session.heard == count and computes(before, self._neighbours.signs(peer)):
                self._acknowledging.excuse(incarnation)
            else:
                self._keeps_too_much(peer, f"none of them for {self._lost_after:g} s")
        for peer in full.values():
            if peer.session.kept > _MOST_UNACKNOWLEDGED:
                self._keeps_too_much(peer, "too few")

    def _keeps_too_much(self, peer: Peer, acknowledged: str) -> None:
        session = peer.session
        if session.is_full():  # otherwise it has just been lost
            what = f"{len(session.sent)} messages ({session.kept >> 20} MiB) are kept for it"
            self._lose(
                peer, f"it does not acknowledge what it gets: {what}, and it acknowledged {acknowledged}"
            )

    def _is_silent(self, peer: Peer) -> None:
        before = self._asked.pop(peer.incarnation, None)
        now = self._neighbours.signs(peer)
        if before is None and now is None:  # its process was not known
            self._neighbours.find(peer)
            now = self._neighbours.signs(peer)
            if now is not None and not now.stopped:  # the next look tells whether it has computed
                self._liveness.excuse(peer.incarnation)
                return
        if computes(before, now):
            self._liveness.excuse(peer.incarnation)
            logger.warning(
                "worker '%s' has given no sign of life for %g s, but its process computes: something "
                "there holds the interpreter",
                peer.name,
                self._lost_after,
            )
            return
        if before is None:
            what = "its process is stopped, or cannot be reached"
        elif now is None or now.start != before.start:
            what = "its process has ended"
        elif now.stopped:
            what = f"its process ({peer.link.process}) is stopped"
        else:
            what = f"its process ({peer.link.process}) sleeps, and its interpreter does not answer"
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - self._lost_after))
        self._lose(
            peer, f"it has given no sign of life for {self._lost_after:g} s, since about {since}: {what}"
        )

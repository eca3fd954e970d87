"""The workers of a job on other hosts: their state is transferred between workers of the job.

A command gives the order ``gather`` to one worker of this host. That worker asks one worker of each other
host, over their authenticated connection. The answer has the state of all workers there, as read from the
files of that host, also of those that are dead or whose interpreter hangs. It is written to the job's folder
here. No port is opened for this.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from farcall.observe.format.job_files import write_private
from farcall.observe.format.jobs import JobFolder, job_id
from farcall.observe.format.orders import give_order
from farcall.observe.reading.gathered import GATHERED, ORDER, pack_states
from farcall.observe.reading.reader import read_job
from farcall.observe.worker.counters import COUNT
from farcall.observe.worker.observer import Observer
from rpc.agent.agent import Agent
from rpc.errors import ProtocolError, RpcError
from rpc.group.peer import Peer
from rpc.serialization.payload import Payload
from rpc.wire.frames import Frame, Kind

__all__ = ["STATES", "TOPIC", "FarHosts", "ignore"]

TOPIC: Final = "observe"
"""Topic of control messages: questions for the state of all workers of a host."""

STATES: Final = Kind.EXTENSION + 31
"""Kind of the answers."""

_MAX_BYTES: Final = 64 << 20
_SEND_SECONDS: Final = 5.0


class FarHosts:
    """One worker's part in it.

    Args:
        observer: observer of this process.
        agent: agent that has not joined its group yet.
    """

    def __init__(self, observer: Observer, agent: Agent) -> None:
        self._observer = observer
        self._agent = agent
        self._asked: Counter[Peer] = Counter()
        self._lock = threading.Lock()
        agent.messages.control.uncounted.add(TOPIC)
        agent.messages.control.on(TOPIC, self._question)
        agent.messages.on(STATES, self._answered)
        observer.orders.on(ORDER, self._gather)

    def _gather(self, order: dict[str, Any]) -> None:
        """Ask one worker of each other host. On the observing thread."""
        if order.get("by") != os.getpid():
            return
        for peer in one_of_each_host(self._agent.group.peers.all()):
            self.ask(peer, COUNT if order.get("count") is True else None)

    def ask(self, peer: Peer, body: object = None) -> None:
        """Ask a worker for the state of all workers of its host, which is soon in the folder."""
        with self._lock:
            self._asked[peer] += 1
        self._agent.messages.control.post(peer, TOPIC, body)

    def _question(self, peer: Peer, body: object) -> None:
        """Handle a question. On the loop's thread."""
        if body == COUNT:
            self._observer.soon(self._count)
        self._observer.soon(lambda: self._answer(peer))

    def _count(self) -> None:
        """Make the workers of this host count. On the observing thread."""
        path = self._observer.path
        if path is not None:
            give_order(path.parent, COUNT)

    def _answer(self, peer: Peer) -> None:
        """Send the state of all workers of this host. On the observing thread."""
        path = self._observer.path
        if path is None or peer.lost is not None:
            return
        packed = pack_states(read_job(JobFolder(path.parent.name, path.parent, 0.0, 0), gathered=False))
        with contextlib.suppress(RpcError):  # it is gone, or accepts nothing now
            payload = Payload({}, [b"", packed])
            self._agent.messages.sender.send(peer, STATES, 0, payload, wait=_SEND_SECONDS)

    def _answered(self, peer: Peer, frame: Frame) -> None:
        """Handle an answer. On the loop's thread."""
        with self._lock:
            if not self._asked[peer]:
                raise ProtocolError("the state of a host that was not asked for")
            self._asked[peer] -= 1
        packed = b"".join(frame.buffers)
        if len(packed) <= _MAX_BYTES:
            self._observer.soon(lambda: self._leave(peer, packed))

    def _leave(self, peer: Peer, packed: bytes) -> None:
        """Write an answer to the folder of the job. On the observing thread."""
        path = self._observer.path
        if path is not None:
            write_private(path.parent / f"{job_id(peer.member.host)}{GATHERED}", packed)


def one_of_each_host(peers: Iterable[Peer]) -> list[Peer]:
    """Return one living worker of each other host, a connected one if possible."""
    found: dict[str, Peer] = {}
    for peer in sorted(peers, key=lambda each: not each.connected):
        if not peer.near and not peer.is_self and peer.lost is None:
            found.setdefault(peer.member.host, peer)
    return list(found.values())


def ignore(agent: Agent) -> None:
    """Answer no question: this worker is not observed."""
    agent.messages.control.uncounted.add(TOPIC)
    agent.messages.control.on(TOPIC, lambda _peer, _body: None)

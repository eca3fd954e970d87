"""Connecting and reconnecting: carries out what a worker's ``Link`` decides. On the loop's thread."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Mapping
from typing import Final, Protocol

from rpc.errors import RpcError
from rpc.group.link import GiveUp, LinkState
from rpc.group.own_time import LEAST_SECONDS, Neighbours, OwnTime
from rpc.group.peer import Peer
from rpc.runtime.legible import legible
from rpc.runtime.process_signs import ProcessSigns, computes
from rpc.transport.base import Connection, ConnectionOwner, Transport, Unreachable
from rpc.transport.tls import why_no_tls

__all__ = ["QUIET_SECONDS", "Dialler", "DiallerOwner"]

logger = logging.getLogger(__name__)

QUIET_SECONDS: Final = 0.0005
"""Interval in seconds at which it is checked whether all data of a broken connection has been processed."""

_CROSSED_SECONDS: Final = 1.0
"""Timeout in seconds for a hello to a worker that connects as well; then it is considered lost."""

_REDIAL_SECONDS: Final = 3.0
"""Timeout in seconds for an address that has answered before, so that a restored link is found soon."""

_ANOTHER_LOOK_SECONDS: Final = 3.0
"""Time in seconds after which the process of a worker that cannot be reached is looked at again."""

_MAY_PASS: Final = frozenset(
    (
        errno.ECONNABORTED,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.EHOSTDOWN,
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.EADDRNOTAVAIL,
        errno.EAGAIN,
        errno.EMFILE,
        errno.ENFILE,
        errno.EACCES,  # this and the last two come from a firewall of this host: the other side may connect
        errno.EPERM,
        errno.EINVAL,
    )
)
"""Errors after which another attempt may succeed. A refused connection is not one: the process has ended."""


class DiallerOwner(Protocol):
    """Decides what to do about a worker that is reached, or is not."""

    closed: bool
    connect_seconds: float
    reconnect_seconds: float
    own_time: OwnTime
    neighbours: Neighbours

    def reached(self, peer: Peer, connection: Connection) -> None:
        """One of its addresses accepted a connection: start the handshake, unless it is no longer needed."""

    def peer_broke(self, peer: Peer) -> None:
        """The connection to it broke, and will be made again."""

    def lose(self, peer: Peer, reason: str) -> None:
        """No further attempt is made: the worker is lost."""


class Dialler:
    """Connects one agent to the other workers.

    Args:
        loop: the agent's loop.
        transports: the transports by scheme, best first.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transports: Mapping[str, Transport], owner: DiallerOwner
    ) -> None:
        self._loop = loop
        self._transports = transports
        self._owner = owner
        self._dialling: set[asyncio.Task[None]] = set()
        self._signs: dict[int, ProcessSigns | None] = {}
        """For workers that cannot be reached, by incarnation: the state of their process at the last look."""

    def stop(self) -> None:
        """Give up all attempts."""
        for task in self._dialling:
            task.cancel()

    def connect(self, peer: Peer) -> None:
        """Connect to a peer unless there is a connection or an attempt."""
        if not self._owner.closed and peer.link.dial():
            self._dial_soon(peer)

    def greet_again(self, peer: Peer) -> None:
        """Greet a silent worker again: it may be busy, or its end of the connection may be lost unnoticed."""
        if peer.link.state is LinkState.HANDSHAKING and not self._owner.closed:
            self._dial_soon(peer)

    def _dial_soon(self, peer: Peer) -> None:
        task = self._loop.create_task(self._dial(peer))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    def _connect_later(self, peer: Peer, pause: float) -> None:
        """Make no attempt for ``pause`` seconds, whatever is to be sent, and then one."""
        peer.link.pause()
        self._loop.call_later(pause, self._resume, peer)

    def _resume(self, peer: Peer) -> None:
        peer.link.resume()
        self.connect(peer)

    async def _dial(self, peer: Peer) -> None:
        """Connect to a worker at the first of its addresses that answers."""
        failures: list[str] = []
        hint = ""
        may_live = False
        for address in peer.member.addresses:
            scheme = address.partition(":")[0]
            if scheme not in self._transports or (scheme == "unix" and not peer.near):
                continue
            try:
                seconds = _REDIAL_SECONDS if peer.session.connections else self._owner.connect_seconds
                connection = await self._within(seconds, self._transports[scheme].connect(address))
                break
            except TimeoutError:
                failures.append(f"{_shown(address)}: no answer within {seconds:g} s")
                may_live = True
            except Exception as error:  # unreachable, or a malformed address
                failures.append(f"{_shown(address)}: {_why(error)}")
                may_live |= _may_pass(error)
                refuses = scheme == "unix" and isinstance(error, ConnectionRefusedError)
                if refuses and not peer.session.connections:  # nothing listens there, and it is met first now
                    hint = " (did its program end without rpc.shutdown()?)"
        else:
            where = "; ".join(failures) or "any address known here"
            self.failed(peer, f"it cannot be reached at {where}{hint}", may_live=may_live)
            return
        while not peer.is_quiet:  # noqa: ASYNC110  # a matter of microseconds, which nothing tells
            await asyncio.sleep(QUIET_SECONDS)
        self._owner.reached(peer, connection)

    async def _within(self, seconds: float, connecting: Awaitable[Connection]) -> Connection:
        """Wait for a connection, at most so many seconds of this worker's own time."""
        due = self._owner.own_time() + seconds
        task = asyncio.ensure_future(connecting)
        try:
            while not task.done():
                left = due - self._owner.own_time()
                done, _ = await asyncio.wait((task,), timeout=max(left, LEAST_SECONDS))
                if not done and left <= LEAST_SECONDS:  # the last wait let the loop read what has arrived
                    raise TimeoutError
            return task.result()
        except asyncio.CancelledError:
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().owner = ConnectionOwner()
                task.result().close("not needed any more")
            raise
        finally:
            task.cancel()

    def failed(self, peer: Peer, reason: str, *, may_live: bool = True) -> None:
        """An attempt to connect has failed: try again after a pause, or give the worker up."""
        if peer.connected or self._owner.closed:
            return
        now, patience = self._owner.own_time(), self._owner.reconnect_seconds
        if peer.link.process and may_live and patience:
            self._signs.setdefault(peer.incarnation, self._owner.neighbours.signs(peer))
        verdict = peer.link.failed(reason, now, patience, may_live=may_live)
        if isinstance(verdict, GiveUp) and may_live and patience and self._may_be_busy(peer):
            peer.link.be_patient(now, patience, _ANOTHER_LOOK_SECONDS)
            verdict = peer.link.failed(reason, now, patience)
        if isinstance(verdict, GiveUp):
            self._owner.lose(peer, verdict.reason)
        elif verdict is not None:
            self._connect_later(peer, verdict)

    def _may_be_busy(self, peer: Peer) -> bool:
        """Whether a worker that is about to be given up is on this host, and its process has computed, or
        waited for a core, since the last look; or was not looked at before, and is not stopped.
        """
        neighbours = self._owner.neighbours
        neighbours.find(peer)
        first = peer.incarnation not in self._signs
        before, now = self._signs.get(peer.incarnation), neighbours.signs(peer)
        self._signs[peer.incarnation] = now
        return now is not None and not now.stopped if first else computes(before, now)

    def broke(self, peer: Peer, reason: str, *, connect: bool = True) -> None:
        """Handle the loss of an established connection whose worker may live: connect again, unless the other
        side is doing that (``connect=False``).
        """
        if self._owner.closed:
            return
        progressed = peer.session.has_progressed
        now, patience = self._owner.own_time(), self._owner.reconnect_seconds
        reason = legible(reason)
        self._signs.pop(peer.incarnation, None)
        verdict = peer.link.broke(reason, now, patience, progressed=progressed)
        if verdict is None:
            return
        logger.info("the connection to worker '%s' is made again: %s", peer.name, reason)
        peer.disconnected()
        self._owner.peer_broke(peer)
        if isinstance(verdict, GiveUp):
            self._owner.lose(peer, verdict.reason)
        elif not connect:
            return
        elif verdict:
            self._connect_later(peer, verdict)
        else:
            self.connect(peer)

    def crosses(self, peer: Peer) -> None:
        """Wait for this side's attempt to succeed, after it has refused the other side's."""
        began = peer.session.connections
        self._loop.call_later(_CROSSED_SECONDS, self._greet_again_unless_heard, peer, began)

    def _greet_again_unless_heard(self, peer: Peer, connections: int) -> None:
        if peer.session.connections == connections:
            self.greet_again(peer)

    def crossed(self, peer: Peer) -> None:
        """Wait for the other side's attempt, after it has refused this side's."""
        began = peer.session.connections
        due = self._owner.own_time() + self._owner.connect_seconds
        self._loop.call_later(self._owner.connect_seconds, self._crossed_expired, peer, began, due)

    def _crossed_expired(self, peer: Peer, connections: int, due: float) -> None:
        if peer.link.state is not LinkState.CROSSED or peer.session.connections != connections:
            return
        left = due - self._owner.own_time()
        if left > LEAST_SECONDS:  # this worker waited for a core
            self._loop.call_later(left, self._crossed_expired, peer, connections, due)
        else:
            self.failed(peer, f"it did not connect within {self._owner.connect_seconds:g} s, as announced")


def _may_pass(error: Exception) -> bool:
    """Whether another attempt may succeed."""
    if isinstance(error, ssl.SSLError):  # its error numbers are not the system's
        return isinstance(error, ssl.SSLEOFError)
    if isinstance(error, Unreachable) or not isinstance(error, OSError | RpcError | ValueError):
        return True  # this process lacks memory or threads
    if isinstance(error, socket.gaierror):
        return error.errno in (socket.EAI_AGAIN, socket.EAI_MEMORY)
    return isinstance(error, OSError) and error.errno in _MAY_PASS


def _shown(address: str) -> str:
    """Format an address for errors. The name of a local socket would not help a user."""
    return "its socket on this host" if address.startswith("unix:") else address


def _why(error: Exception) -> str:
    """Return why a connection failed, in the system's words."""
    if isinstance(error, ssl.SSLError):
        return why_no_tls(error)
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(getattr(error, "strerror", None) or error)

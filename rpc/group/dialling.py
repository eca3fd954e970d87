"""Dialling, and dialling again: when a worker is connected to, and for how long that is tried.

A connection that breaks is made again at once; attempts that fail, and connections that break as soon as they
are made, are followed by pauses that grow. A worker whose own addresses refuse has ended; one that is not
reached for as long as the desk's ``reconnect_seconds`` say is lost. On the loop's thread.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import ssl
from collections.abc import Mapping
from typing import Final, Protocol

from rpc.group.connection_state import Event, State
from rpc.group.peer import Peer
from rpc.transport.base import Connection, Transport, Unreachable

__all__ = ["QUIET_SECONDS", "Dialler", "DiallerDesk"]

logger = logging.getLogger(__name__)

QUIET_SECONDS: Final = 0.0005
"""How soon to look again whether the last of a connection that broke is taken in."""

_PAUSES: Final = (0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.2)
"""Seconds between attempts to connect, the last for all others. Of a process that is just dying, connections
may end before its address refuses.
"""

_STEADY_SECONDS: Final = 1.0
"""A connection that lasts no longer, and on which nothing is taken in or acknowledged, was made in vain."""

_FIRST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 2.0
"""Seconds between a connection that was made in vain and the next, from the second on; they double."""

_PATIENCE: Final = 3
"""So many connections may be made in vain at least."""

_CROSSED_SECONDS: Final = 1.0
"""How long a hello may go unanswered by who connects as well, and so is there, until it is taken for lost."""

_REDIAL_SECONDS: Final = 3.0
"""How long an address may take that has answered before, so that a link which comes back is found soon."""

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
    )
)
"""Errors of an attempt after which another may succeed. A refusal is none: nobody listens there any more."""


class DiallerDesk(Protocol):
    """Who decides what becomes of a worker that is reached, or is not."""

    closed: bool
    connect_seconds: float
    reconnect_seconds: float

    def reached(self, peer: Peer, connection: Connection) -> None:
        """Somebody listens at one of its addresses: to be greeted, unless that is not needed any more."""

    def peer_broke(self, peer: Peer) -> None:
        """The connection to it broke, and is about to be made again."""

    def lose(self, peer: Peer, reason: str) -> None:
        """It is not tried any more."""


class Dialler:
    """Connects one agent to the other workers.

    Args:
        loop: the agent's loop.
        transports: by scheme, best first.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transports: Mapping[str, Transport], desk: DiallerDesk
    ) -> None:
        self._loop = loop
        self._transports = transports
        self._desk = desk
        self._dialling: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """Give up all attempts."""
        for task in self._dialling:
            task.cancel()

    def connect(self, peer: Peer) -> None:
        """Connect to a peer unless there is a connection or an attempt."""
        if not self._desk.closed and not peer.rests and peer.step(Event.DIAL):
            self._dial_soon(peer)

    def greet_again(self, peer: Peer) -> None:
        """A worker that was greeted is silent: it may be busy, or its end of the connection gone unheard."""
        if peer.state is State.HANDSHAKING and not self._desk.closed:
            self._dial_soon(peer)

    def _dial_soon(self, peer: Peer) -> None:
        task = self._loop.create_task(self._dial(peer))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    def _connect_later(self, peer: Peer, pause: float) -> None:
        """Not before so many seconds, whatever is to be sent."""
        peer.rests = True
        self._loop.call_later(pause, self._rested, peer)

    def _rested(self, peer: Peer) -> None:
        peer.rests = False
        self.connect(peer)

    async def _dial(self, peer: Peer) -> None:
        """Connect to a worker at the first of its addresses that answers."""
        failures: list[str] = []
        may_live = False
        for address in peer.member.addresses:
            scheme = address.partition(":")[0]
            if scheme not in self._transports or (scheme == "unix" and not peer.near):
                continue
            try:
                seconds = _REDIAL_SECONDS if peer.session.connections else self._desk.connect_seconds
                async with asyncio.timeout(seconds):
                    connection = await self._transports[scheme].connect(address)
                break
            except TimeoutError:
                failures.append(f"{_shown(address)}: no answer within {seconds:g} s")
                may_live = True
            except Exception as error:  # unreachable, or an address that makes no sense
                failures.append(f"{_shown(address)}: {_why(error)}")
                may_live |= isinstance(error, OSError) and (
                    error.errno in _MAY_PASS or isinstance(error, ssl.SSLEOFError | Unreachable)
                )
        else:
            where = "; ".join(failures) or "any address known here"
            self.failed(peer, f"it cannot be reached at {where}", may_live=may_live)
            return
        while not peer.is_quiet:  # noqa: ASYNC110  # a matter of microseconds, which nothing tells
            await asyncio.sleep(QUIET_SECONDS)
        self._desk.reached(peer, connection)

    def failed(self, peer: Peer, reason: str, *, may_live: bool = True) -> None:
        """An attempt to connect has failed; try again soon, unless the worker has ended, or it is enough."""
        if peer.connected or self._desk.closed:
            return
        now = self._loop.time()
        if peer.broken is None:
            peer.broken, peer.broken_since = "", now
        why = f"{peer.broken}; " if peer.broken else ""
        if not may_live:
            peer.has_ended = True
            self._desk.lose(peer, f"{why}its process has died, most likely: {reason}" if why else reason)
        elif now - peer.broken_since >= self._desk.reconnect_seconds:
            within = f" for {self._desk.reconnect_seconds:g} s" if self._desk.reconnect_seconds else ""
            self._desk.lose(peer, f"{why}{reason}{within}")
        elif peer.step(Event.BREAK):
            pause = _PAUSES[min(peer.failures, len(_PAUSES) - 1)]
            peer.failures += 1
            self._connect_later(peer, pause)

    def broke(self, peer: Peer, reason: str, *, connect: bool = True) -> None:
        """An established connection is closed, and its worker may live."""
        if self._desk.closed or not peer.step(Event.BREAK):
            return
        logger.info("the connection to worker '%s' is made again: %s", peer.name, reason)
        peer.broken_since = now = self._loop.time()
        if peer.has_progressed or now - peer.connected_since > _STEADY_SECONDS:
            peer.in_vain = 0
        if not peer.in_vain:
            peer.in_vain_since = now
        peer.in_vain += 1
        peer.broke(reason)
        self._desk.peer_broke(peer)
        if peer.in_vain > _PATIENCE and now - peer.in_vain_since >= self._desk.reconnect_seconds:
            self._desk.lose(peer, f"{reason}, and so {peer.in_vain} times, as soon as it was connected")
        elif connect and peer.in_vain == 1:
            self.connect(peer)
        elif connect:
            self._connect_later(peer, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (peer.in_vain - 2)))

    def crosses(self, peer: Peer) -> None:
        """This side has refused the other's attempt, since it connects itself: the other awaits that."""
        began = peer.session.connections
        self._loop.call_later(_CROSSED_SECONDS, self._greet_again_unless_heard, peer, began)

    def _greet_again_unless_heard(self, peer: Peer, connections: int) -> None:
        if peer.session.connections == connections:
            self.greet_again(peer)

    def crossed(self, peer: Peer) -> None:
        """The other side has refused the attempt, since it connects itself: it is awaited."""
        began = peer.session.connections
        self._loop.call_later(self._desk.connect_seconds, self._crossed_expired, peer, began)

    def _crossed_expired(self, peer: Peer, connections: int) -> None:
        if peer.state is State.CROSSED and peer.session.connections == connections:
            self.failed(peer, f"it did not connect within {self._desk.connect_seconds:g} s, as announced")


def _shown(address: str) -> str:
    """An address in errors. The name of a socket within a host says nothing to people."""
    return "its socket on this host" if address.startswith("unix:") else address


def _why(error: Exception) -> str:
    """What hinders a connection, in the system's words."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(getattr(error, "strerror", None) or error)

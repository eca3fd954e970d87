"""The link to another worker: the states of its connection, as a table, with the data that belongs to them.

Everything that affects the order of the states is here. ``Connections`` and ``Dialler`` report events and
carry out what the link decides: when to try again, and when to give the worker up. No I/O, and no clock: the
time is an argument.

A connection that breaks is made again, by whichever side is first, and messages continue where they stopped
(``rpc.transport.session``). Attempts that fail are followed by growing pauses, and so are connections that
break as soon as they are made. A worker is gone for good when its address refuses, when another incarnation
answers there, when it has given this one up, or when all attempts fail for as long as the option
``reconnect_within`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["ANSWERING", "CONNECTING", "TRANSITIONS", "GiveUp", "Link", "LinkEvent", "LinkState"]


class LinkState(Enum):
    """State of the connection, as seen from this side."""

    UNCONNECTED = "nothing was sent yet"
    DIALLING = "this worker tries the other's addresses"
    HANDSHAKING = "this worker has said hello"
    CROSSED = "the other connects as well, and its attempt counts: it is awaited"
    ESTABLISHED = "frames flow"
    BROKEN = "it broke, or an attempt failed: another follows"
    LEFT = "this worker has said goodbye"
    LOST = "the other worker is gone"


class LinkEvent(Enum):
    """Events of the connection."""

    DIAL = "something is to be sent"
    REACH = "one of the other's addresses answers; an earlier hello no longer counts"
    WELCOME = "the other side has accepted this side's attempt"
    CROSS = "the other side has refused it, since it connects itself"
    ACCEPT = "this side has accepted the other's attempt"
    BREAK = "the connection is lost, or the attempt has failed, and the other worker may live"
    LEAVE = "this worker leaves"
    LOSE = "the other worker has died, left, sent malformed messages, cannot be reached, or refuses"


_END: Final = {LinkEvent.LEAVE: LinkState.LEFT, LinkEvent.LOSE: LinkState.LOST}

TRANSITIONS: Final[Mapping[LinkState, Mapping[LinkEvent, LinkState]]] = {
    LinkState.UNCONNECTED: {
        LinkEvent.DIAL: LinkState.DIALLING,
        LinkEvent.ACCEPT: LinkState.ESTABLISHED,
        **_END,
    },
    LinkState.DIALLING: {
        LinkEvent.REACH: LinkState.HANDSHAKING,
        LinkEvent.ACCEPT: LinkState.ESTABLISHED,
        LinkEvent.BREAK: LinkState.BROKEN,
        **_END,
    },
    LinkState.HANDSHAKING: {
        LinkEvent.REACH: LinkState.HANDSHAKING,
        LinkEvent.WELCOME: LinkState.ESTABLISHED,
        LinkEvent.CROSS: LinkState.CROSSED,
        LinkEvent.ACCEPT: LinkState.ESTABLISHED,
        LinkEvent.BREAK: LinkState.BROKEN,
        **_END,
    },
    LinkState.CROSSED: {LinkEvent.ACCEPT: LinkState.ESTABLISHED, LinkEvent.BREAK: LinkState.BROKEN, **_END},
    LinkState.ESTABLISHED: {LinkEvent.BREAK: LinkState.BROKEN, **_END},
    LinkState.BROKEN: {LinkEvent.DIAL: LinkState.DIALLING, LinkEvent.ACCEPT: LinkState.ESTABLISHED, **_END},
    LinkState.LEFT: {},
    LinkState.LOST: {},
}
"""An event that is not listed for a state changes nothing: an attempt that ends too late is ignored."""

CONNECTING: Final = frozenset({LinkState.DIALLING, LinkState.HANDSHAKING})
"""States in which an attempt of this worker is under way and may succeed; a crossed one will not."""

ANSWERING: Final = frozenset({LinkState.ESTABLISHED, LinkState.HANDSHAKING, LinkState.CROSSED})
"""States in which the other worker should answer: it is connected, or has been greeted."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Decision of a link: the worker is lost, because of ``reason``."""

    reason: str


_PAUSES: Final = (0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.2)
"""Pauses between failed attempts, in seconds; the last one repeats. While a process is dying, connections
to it may end before its address refuses.
"""

_STEADY_SECONDS: Final = 1.0
"""Lifetime, in seconds, up to which a connection that carried nothing counts as fruitless."""

_FIRST_FRUITLESS_PAUSE: Final = 0.005
_LONGEST_FRUITLESS_PAUSE: Final = 2.0
"""Pauses after fruitless connections in a row, in seconds, from the second on; they double."""

_LEAST_FRUITLESS: Final = 3
"""Number of fruitless connections in a row that are always followed by another attempt."""


class Link:
    """State of the connection to one worker. For the loop's thread; attributes may be read on any thread.

    Attributes:
        state: the current state.
        dialled: whether this side made the connection that is open, or was last.
        failures: the number of failed attempts since the last connection.
        paused: whether no attempt may be made until the current pause is over.
        process: the process ID of a worker on this host, once a connection has been seen; else None.
        claimed_by: the incarnation that came under the worker's name or id while it was connected, or None.

    Example::

        link = Link()
        assert link.dial() and link.reach(None) and link.welcome(now=3.0)
        assert link.broke("reset by peer", now=3.5, progressed=True, patience=30.0) == 0.0  # again, at once
    """

    __slots__ = (
        "_accepted_at",
        "_broken",
        "_broken_since",
        "_connected_since",
        "_fruitless",
        "_fruitless_since",
        "claimed_by",
        "dialled",
        "failures",
        "paused",
        "process",
        "state",
    )

    def __init__(self) -> None:
        self.state = LinkState.UNCONNECTED
        self.dialled = False
        self.paused = False
        self.process: int | None = None
        self.claimed_by: int | None = None
        self._accepted_at = 0
        """Messages and heartbeats received when this side last accepted the other's attempt."""
        self._connected_since = 0.0
        self._broken: str | None = None
        """Why the last connection broke; empty if there was none and attempts fail; None while connected."""
        self._broken_since = 0.0
        self.failures = 0
        self._fruitless = 0
        """Fruitless connections in a row, and since when."""
        self._fruitless_since = 0.0

    @property
    def should_answer(self) -> bool:
        """Whether the other worker should answer: it is connected, or has been greeted."""
        return self.state in ANSWERING

    def _step(self, event: LinkEvent) -> bool:
        following = TRANSITIONS[self.state].get(event)
        if following is not None:
            self.state = following
        return following is not None

    # ---- events, each of which returns whether it makes a difference in the current state

    def dial(self) -> bool:
        """Start an attempt, because something is to be sent, unless one is under way or there is a pause."""
        return not self.paused and self._step(LinkEvent.DIAL)

    def reach(self, process: int | None) -> bool:
        """One of the worker's addresses answers."""
        if not self._step(LinkEvent.REACH):
            return False
        self._is_process(process)
        return True

    def cross(self) -> bool:
        """The other side has refused the attempt, since it connects itself."""
        return self._step(LinkEvent.CROSS)

    def welcome(self, now: float) -> bool:
        """The other side has accepted this side's attempt."""
        if not self._step(LinkEvent.WELCOME):
            return False
        self.dialled = True
        self._connected(now)
        return True

    def accept(self, now: float, process: int | None = None, heard: int = 0) -> bool:
        """This side has accepted the other's attempt; ``heard``: messages and heartbeats received so far."""
        if not self._step(LinkEvent.ACCEPT):
            return False
        self.dialled = False
        self._is_process(process)
        self._accepted_at = heard
        self._connected(now)
        return True

    def leave(self) -> bool:
        """This worker leaves."""
        return self._step(LinkEvent.LEAVE)

    def lose(self) -> bool:
        """The other worker is gone for good."""
        return self._step(LinkEvent.LOSE)

    def _is_process(self, process: int | None) -> None:
        """Keep the worker's process, which a connection over TCP does not tell: it is the same for all."""
        if process is not None:
            self.process = process

    def _connected(self, now: float) -> None:
        self._connected_since = now
        self._broken, self.failures = None, 0

    # ---- events that call for a decision: seconds until the next attempt, or to give up

    def failed(
        self, reason: str, now: float, patience: float, *, may_live: bool = True
    ) -> float | GiveUp | None:
        """An attempt has failed.

        Args:
            reason: why, for the log.
            now: the current time, in seconds.
            patience: how long attempts may fail, in seconds, before the worker is given up.
            may_live: False if its address refuses, so that its process has ended.

        Returns:
            The pause before the next attempt, in seconds; or that the worker is to be given up; or None if
            the failure makes no difference.
        """
        if self._broken is None:
            self._broken, self._broken_since = "", now
        broke = f"{self._broken}; " if self._broken else ""
        if not may_live:
            died = f"{broke}its process has died, most likely: {reason}"
            return GiveUp(died if broke else reason)
        if now - self._broken_since >= patience:
            within = f" for {patience:g} s" if patience else ""
            return GiveUp(f"{broke}{reason}{within}")
        if not self._step(LinkEvent.BREAK):
            return None
        pause = _PAUSES[min(self.failures, len(_PAUSES) - 1)]
        self.failures += 1
        return pause

    def broke(self, reason: str, now: float, patience: float, *, progressed: bool) -> float | GiveUp | None:
        """The connection is closed, and the worker may live; arguments and result as for ``failed``.

        Args:
            progressed: whether anything was received or acknowledged over that connection.
        """
        if not self._step(LinkEvent.BREAK):
            return None
        self._broken, self._broken_since = reason, now
        if progressed or now - self._connected_since > _STEADY_SECONDS:
            self._fruitless = 0
        if not self._fruitless:
            self._fruitless_since = now
        self._fruitless += 1
        if self._fruitless > _LEAST_FRUITLESS and now - self._fruitless_since >= patience:
            return GiveUp(f"{reason}, and so {self._fruitless} times, as soon as it was connected")
        if self._fruitless == 1:
            return 0.0
        return min(_LONGEST_FRUITLESS_PAUSE, _FIRST_FRUITLESS_PAUSE * 2.0 ** (self._fruitless - 2))

    def has_lost_its_end(self, seen: int, connections: int, heard: int) -> bool:
        """Whether the other side has lost the connection that this side still has, so that its new attempt
        is not merely late.

        Args:
            seen: the number of connections that the other side knows of.
            connections: the number that this side has had.
            heard: messages and heartbeats received so far.
        """
        # It may not have learned that its last attempt was accepted, if nothing came over that connection.
        unheard = not self.dialled and heard == self._accepted_at
        return seen == connections or (seen == connections - 1 and unheard)

    def be_patient(self, now: float, patience: float, seconds: float) -> None:
        """Give the worker up in ``seconds`` at the earliest, since it may live; other arguments as for
        ``failed``.
        """
        self._broken_since = now - patience + seconds

    def pause(self) -> None:
        """Make no attempt until ``resume``, whatever is to be sent."""
        self.paused = True

    def resume(self) -> None:
        """The pause is over."""
        self.paused = False

"""The fence: what must happen everywhere before a dead user's forks may be dropped.

A dead worker may have forked a reference to a living one that is about to have it confirmed. Were the
owner to drop the dead one's forks at once, it could free the object that the living one holds. So it asks
every living worker to cut the dead one off, to throw away what is unread of it, and to answer when each
fork it had already taken from the dead one is settled, that is counted by the owner or refused. After the
last answer no fork that came from the dead is unaccounted for, and none can turn up.

The dead are fenced together, never one by one. Had ``u`` handed a fork to ``z``, and ``z`` to ``v``, all of
them unconfirmed, then ``v`` has settled what it got from ``u`` (nothing) while what keeps its fork alive is
still ``u``'s. So whoever dies before a fence is over is added to it; and whoever died with no need for a
fence is remembered, and is part of the next one.

A fence starts when a worker is lost that has forks here, or when a living worker is *bereaved*: the
child of a fork of its own was at the dead one. It keeps that child until the fence is over, for the same
reason: its own fork may be all that the owner counts of what the dead one had passed on.
"""

from __future__ import annotations

from collections.abc import Callable

from rref.protocol.messages import ForkId, Peer
from rref.protocol.peers import Peers

__all__ = ["FenceAnswers", "Fences"]


class Fences:
    """The owner's side: asks, waits, and says when it is over.

    Args:
        peers: the living and the dead.
        over: called with the dead whose forks may now be dropped.
    """

    __slots__ = ("_bereaved", "_fenced", "_over", "_peers", "_waiting")

    def __init__(self, peers: Peers, over: Callable[[set[Peer]], None]) -> None:
        self._peers = peers
        self._over = over
        self._fenced: set[Peer] = set()  # those whom the fence now up is about
        self._waiting: dict[Peer, set[Peer]] = {}  # living -> the dead it has not yet answered for
        self._bereaved: dict[Peer, set[Peer]] = {}  # dead -> the living who asked to be told

    def __len__(self) -> int:
        return len(self._fenced) + len(self._waiting) + len(self._bereaved)

    def lost(self, peer: Peer, has_forks: bool) -> None:
        """``peer`` is dead, and cut off from this worker."""
        self._waiting.pop(peer, None)
        for dead, waiting in list(self._bereaved.items()):
            waiting.discard(peer)
            if not waiting:
                del self._bereaved[dead]
        if has_forks or self._fenced or peer in self._bereaved:
            self._raise()

    def bereaved(self, peer: Peer, dead: Peer) -> None:
        """``peer`` holds a child that was at ``dead`` and wants to know when it may let go."""
        if dead in self._peers.dead and dead not in self._peers.unfenced:
            self._peers.send(peer, ["cleared", dead])
            return
        self._peers.note_hearsay(peer, dead not in self._peers.living and dead not in self._peers.dead)
        self._bereaved.setdefault(dead, set()).add(peer)
        if dead in self._peers.dead:
            self._raise()
        else:
            self._peers.suspect(dead, "another worker lost it")

    def joined(self, peer: Peer) -> None:
        """``peer`` is new; it may have heard from those whom the fence is about."""
        for dead in self._fenced:
            self._ask(peer, dead)

    def answered(self, peer: Peer, dead: Peer) -> None:
        """``peer`` has nothing unread of ``dead`` and nothing unsettled from it."""
        missing = self._waiting.get(peer)
        if missing is not None:
            missing.discard(dead)
            if not missing:
                del self._waiting[peer]
                self._finish_if_answered()

    def _raise(self) -> None:
        for dead in self._peers.unfenced - self._fenced:
            self._fenced.add(dead)
            for peer in self._peers.living:
                self._ask(peer, dead)
        self._finish_if_answered()

    def _ask(self, peer: Peer, dead: Peer) -> None:
        self._waiting.setdefault(peer, set()).add(dead)
        self._peers.send(peer, ["fence", dead, self._peers.dead.get(dead, "")])

    def _finish_if_answered(self) -> None:
        if self._waiting or not self._fenced:
            return
        over, self._fenced = self._fenced, set()
        self._peers.unfenced -= over
        self._over(over)
        for dead in over:
            for peer in self._bereaved.pop(dead, ()):
                self._peers.send(peer, ["cleared", dead])


class FenceAnswers:
    """Every worker's side: cut off, settle, answer.

    Args:
        peers: the living and the dead.
        unsettled: gives the forks of an owner's objects that came from a peer and are not settled.
    """

    __slots__ = ("_asked", "_peers", "_unsettled", "_unsettled_from")

    def __init__(self, peers: Peers, unsettled: Callable[[Peer, Peer], set[ForkId]]) -> None:
        self._peers = peers
        self._unsettled_from = unsettled
        self._asked: dict[Peer, set[Peer]] = {}  # said to be dead, not yet cut off -> who asked
        self._unsettled: dict[tuple[Peer, Peer], set[ForkId]] = {}  # (owner, dead) -> what it awaits

    def __len__(self) -> int:
        return len(self._asked) + len(self._unsettled)

    def asked(self, owner: Peer, dead: Peer, reason: str) -> None:
        """``owner`` raises a fence around ``dead``."""
        if dead in self._peers.dead:
            self._answer(owner, dead)
        else:
            self._peers.note_hearsay(owner, dead not in self._peers.living)
            self._asked.setdefault(dead, set()).add(owner)
            self._peers.suspect(dead, reason)

    def lost(self, peer: Peer) -> None:
        """``peer`` is dead and cut off: no more forks can come from it."""
        for owner in self._asked.pop(peer, ()):
            self._answer(owner, peer)

    def settled(self, owner: Peer, sender: Peer, fork: ForkId) -> None:
        """``fork``, which came from ``sender``, has had its owner's answer."""
        awaited = self._unsettled.get((owner, sender))
        if awaited is not None:
            awaited.discard(fork)
            if not awaited:
                del self._unsettled[owner, sender]
                self._peers.send(owner, ["fenced", sender])

    def _answer(self, owner: Peer, dead: Peer) -> None:
        unsettled = self._unsettled_from(owner, dead)
        if unsettled:
            self._unsettled[owner, dead] = unsettled
        else:
            self._peers.send(owner, ["fenced", dead])

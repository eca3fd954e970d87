"""The fence: what every worker must do before the forks of a dead user may be dropped.

A dead worker may have forked a reference to a living worker that is about to have it confirmed. If the owner
dropped the dead worker's forks at once, it could free an object that the living worker holds. So the owner
asks every living worker to cut the dead one off, to discard its unread messages, and to answer when every
fork that it had already received from the dead worker is settled, that is, counted by the owner or refused.
After the last answer, no fork that came from the dead worker is unaccounted for, and none can appear later:
unless it went to a newcomer that the owner has not met, which is not asked. That fork is refused.

Dead workers are fenced together, never one by one. Suppose that ``u`` forked a reference to ``z``, and ``z``
to ``v``, all unconfirmed. Then ``v`` has settled what it received from ``u`` (nothing), but its fork is still
kept alive by the fork of ``u``. So a worker that dies before a fence is over is added to that fence, and a
worker that died without needing a fence is remembered and included in the next one.

A fence starts when a worker that has forks here is lost, or when a living worker is *bereaved*: the child of
one of its forks was at the dead worker. It keeps that child until the fence is over, for the same reason: its
own fork may be the only one that the owner counts of those that the dead worker had passed on.
"""

from __future__ import annotations

from collections.abc import Callable

from rref.protocol.messages import ForkId, Peer
from rref.protocol.peers import Peers

__all__ = ["FenceAnswers", "Fences"]


class Fences:
    """The owner's side: asks the living workers, waits for their answers, and reports when the fence is over.

    Args:
        peers: the living and dead workers.
        over: called with the dead workers whose forks may now be dropped.
    """

    __slots__ = ("_bereaved", "_fenced", "_over", "_peers", "_waiting")

    def __init__(self, peers: Peers, over: Callable[[set[Peer]], None]) -> None:
        self._peers = peers
        self._over = over
        self._fenced: set[Peer] = set()  # the dead workers of the current fence
        self._waiting: dict[Peer, set[Peer]] = {}  # living -> the dead for which its answer is missing
        self._bereaved: dict[Peer, set[Peer]] = {}  # dead -> the living workers to notify

    def __len__(self) -> int:
        return len(self._fenced) + len(self._waiting) + len(self._bereaved)

    def lost(self, peer: Peer, has_forks: bool) -> None:
        """Record that ``peer`` is dead, and cut off from this worker."""
        self._waiting.pop(peer, None)
        for dead, waiting in list(self._bereaved.items()):
            waiting.discard(peer)
            if not waiting:
                del self._bereaved[dead]
        if has_forks or self._fenced or peer in self._bereaved:
            self._raise()

    def bereaved(self, peer: Peer, dead: Peer) -> None:
        """Record that ``peer`` has a child that was at ``dead``, and must be notified when it may
        release it.
        """
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
        """Record that ``peer`` is new; it may have received messages from the fenced workers."""
        for dead in self._fenced:
            self._ask(peer, dead)

    def answered(self, peer: Peer, dead: Peer) -> None:
        """Record that ``peer`` has nothing unread from ``dead``, and no unsettled fork from it."""
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
    """The side of every worker: cut the dead worker off, settle its forks, answer.

    Args:
        peers: the living and dead workers.
        unsettled: returns the forks of an owner's objects that came from a peer and are not settled.
    """

    __slots__ = ("_asked", "_peers", "_unsettled", "_unsettled_from")

    def __init__(self, peers: Peers, unsettled: Callable[[Peer, Peer], set[ForkId]]) -> None:
        self._peers = peers
        self._unsettled_from = unsettled
        self._asked: dict[Peer, set[Peer]] = {}  # reported dead, not yet cut off -> the owners that asked
        self._unsettled: dict[tuple[Peer, Peer], set[ForkId]] = {}  # (owner, dead) -> forks not yet settled

    def __len__(self) -> int:
        return len(self._asked) + len(self._unsettled)

    def asked(self, owner: Peer, dead: Peer, reason: str) -> None:
        """Handle the start of a fence around ``dead`` by ``owner``."""
        if dead in self._peers.dead:
            self._answer(owner, dead)
        else:
            self._peers.note_hearsay(owner, dead not in self._peers.living)
            self._asked.setdefault(dead, set()).add(owner)
            self._peers.suspect(dead, reason)

    def lost(self, peer: Peer) -> None:
        """Record that ``peer`` is dead and cut off: no more forks can come from it."""
        for owner in self._asked.pop(peer, ()):
            self._answer(owner, peer)

    def settled(self, owner: Peer, sender: Peer, fork: ForkId) -> None:
        """Record that the owner has answered for ``fork``, which came from ``sender``."""
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

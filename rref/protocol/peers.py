"""Living and dead peers, messages to them, and the shell's actions: shared by all parts of the protocol."""

from __future__ import annotations

from collections import Counter
from typing import Final

from rpc.errors import ProtocolError
from rref.protocol.messages import Action, Fence, Message, Peer, Send

__all__ = ["Peers"]

DEAD_MOST: Final = 65_536

HEARSAY_MOST: Final = 1 << 17
"""Maximum number of unknown objects, forks and workers that a peer may mention between one sweep and the next
but one.
"""


class Peers:
    """The living and the dead workers, and the actions not yet taken.

    A peer that was never announced, and is not known to be dead, is considered alive from its first message
    on. Of dead peers only the incarnation is remembered, for the latest ``DEAD_MOST`` of them.
    """

    __slots__ = (
        "_hearsay",
        "_hearsay_before",
        "_suspects",
        "actions",
        "dead",
        "living",
        "me",
        "unfenced",
    )

    def __init__(self, me: Peer) -> None:
        self.me = me
        self.living: set[Peer] = set()
        self.dead: dict[Peer, str] = {}  # with the reason
        self.unfenced: set[Peer] = set()  # dead peers that no fence has included yet; see fence
        self.actions: Final[list[Action]] = []
        self._suspects: set[Peer] = set()
        self._hearsay: Counter[Peer] = Counter()
        self._hearsay_before: Counter[Peer] = Counter()

    def send(self, peer: Peer, message: Message) -> None:
        """Send ``message`` to ``peer``, unless it is dead."""
        if peer not in self.dead:
            self.actions.append(Send(peer, message))

    def joined(self, peer: Peer) -> bool:
        """Record that ``peer`` is alive; returns whether it was unknown."""
        if peer == self.me or peer in self.living or peer in self.dead:
            return False
        self.living.add(peer)
        return True

    def lost(self, peer: Peer, reason: str) -> bool:
        """Record that ``peer`` is dead, for ever; returns whether it was not known to be."""
        if peer == self.me or peer in self.dead:
            return False
        self.living.discard(peer)
        self._suspects.discard(peer)
        del self._hearsay[peer], self._hearsay_before[peer]
        self.dead[peer] = reason
        self.unfenced.add(peer)
        if len(self.dead) > DEAD_MOST:
            oldest = next(iter(self.dead))
            del self.dead[oldest]
            self.unfenced.discard(oldest)
        return True

    def note_hearsay(self, peer: Peer, is_news: bool = True) -> None:
        """Count an entry that this worker keeps only because ``peer`` mentioned it: an unknown object, a fork
        that may never come, an unknown member.

        Raises:
            ProtocolError: ``peer`` has mentioned too many of them.
        """
        if is_news and peer != self.me:
            self._hearsay[peer] += 1
            if self._hearsay[peer] + self._hearsay_before[peer] > HEARSAY_MOST:
                raise ProtocolError(
                    f"it has mentioned more than {HEARSAY_MOST} unknown objects, forks and workers"
                )

    @property
    def has_hearsay(self) -> bool:
        """Whether there are such counts for a sweep to reset."""
        return bool(self._hearsay or self._hearsay_before)

    def sweep(self) -> None:
        """Forget the counts from before the last sweep; the entries themselves are swept by their owners."""
        self._hearsay_before, self._hearsay = self._hearsay, Counter()

    def suspect(self, peer: Peer, reason: str) -> None:
        """Handle another worker's report that ``peer`` is dead: have the shell cut it off, and confirm by
        ``lost``.
        """
        if peer != self.me and peer not in self.dead and peer not in self._suspects:
            self._suspects.add(peer)
            self.actions.append(Fence(peer, reason))

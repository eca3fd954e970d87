"""Who else lives, what is to be said to them, and what the shell is to do: shared by all of the protocol."""

from __future__ import annotations

from itertools import count
from typing import Final

from rref.protocol.messages import Action, Fence, Message, Peer, Send

__all__ = ["Peers"]

DEAD_MOST: Final = 65_536


class Peers:
    """The living and the dead, the actions not yet taken, and the source of ids.

    A peer that was never announced, and is not among the dead, is taken to live from the first word of it.
    The dead are remembered by their incarnation only, the latest ``DEAD_MOST`` of them; older ones the
    transport no longer lets in.
    """

    __slots__ = ("_numbers", "_suspects", "actions", "dead", "living", "me", "unfenced")

    def __init__(self, me: Peer) -> None:
        self.me = me
        self.living: set[Peer] = set()
        self.dead: dict[Peer, str] = {}  # and why
        self.unfenced: set[Peer] = set()  # the dead about whom no fence has been up since; see fence
        self.actions: Final[list[Action]] = []
        self._suspects: set[Peer] = set()
        self._numbers = count(1)

    def new_id(self) -> tuple[int, int]:
        """An id unique in the group, for a reference or a fork. From any thread."""
        return self.me, next(self._numbers)

    def send(self, peer: Peer, message: Message) -> None:
        """Say ``message`` to ``peer``, unless it is dead."""
        if peer not in self.dead:
            self.actions.append(Send(peer, message))

    def joined(self, peer: Peer) -> bool:
        """Count ``peer`` among the living; true if that is news."""
        if peer == self.me or peer in self.living or peer in self.dead:
            return False
        self.living.add(peer)
        return True

    def lost(self, peer: Peer, reason: str) -> bool:
        """Count ``peer`` among the dead, for ever; true if that is news."""
        if peer == self.me or peer in self.dead:
            return False
        self.living.discard(peer)
        self._suspects.discard(peer)
        self.dead[peer] = reason
        self.unfenced.add(peer)
        if len(self.dead) > DEAD_MOST:
            oldest = next(iter(self.dead))
            del self.dead[oldest]
            self.unfenced.discard(oldest)
        return True

    def suspect(self, peer: Peer, reason: str) -> None:
        """Another worker says that ``peer`` is dead: have the shell cut it off, and confirm by ``lost``."""
        if peer != self.me and peer not in self.dead and peer not in self._suspects:
            self._suspects.add(peer)
            self.actions.append(Fence(peer, reason))

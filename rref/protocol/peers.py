"""Who else lives, what is to be said to them, and what the shell is to do: shared by all of the protocol."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Final

from rpc.errors import ProtocolError
from rref.protocol.messages import Action, Fence, Message, Peer, Send

__all__ = ["Peers"]

DEAD_MOST: Final = 65_536

HEARSAY_MOST: Final = 1 << 17
"""How much a peer may have others remember of what they know nothing of, from one sweep to the next but one.
"""


class Peers:
    """The living and the dead, the actions not yet taken, and the source of ids.

    A peer that was never announced, and is not among the dead, is taken to live from the first word of it.
    The dead are remembered by their incarnation only, the latest ``DEAD_MOST`` of them.
    """

    __slots__ = (
        "_hearsay",
        "_hearsay_before",
        "_numbers",
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
        self.dead: dict[Peer, str] = {}  # and why
        self.unfenced: set[Peer] = set()  # the dead about whom no fence has been up since; see fence
        self.actions: Final[list[Action]] = []
        self._suspects: set[Peer] = set()
        self._numbers = count(1)
        self._hearsay: Counter[Peer] = Counter()
        self._hearsay_before: Counter[Peer] = Counter()

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
        del self._hearsay[peer], self._hearsay_before[peer]
        self.dead[peer] = reason
        self.unfenced.add(peer)
        if len(self.dead) > DEAD_MOST:
            oldest = next(iter(self.dead))
            del self.dead[oldest]
            self.unfenced.discard(oldest)
        return True

    def note_hearsay(self, peer: Peer, is_news: bool = True) -> None:
        """What ``peer`` says has this worker remember something that may mean nothing: an object that it has
        not heard of, a fork that may never come, a member whom nobody has met.

        Raises:
            ProtocolError: it says too much of that.
        """
        if is_news and peer != self.me:
            self._hearsay[peer] += 1
            if self._hearsay[peer] + self._hearsay_before[peer] > HEARSAY_MOST:
                raise ProtocolError(
                    f"it has spoken of more than {HEARSAY_MOST} objects, forks and workers that nobody knows"
                )

    @property
    def has_hearsay(self) -> bool:
        """Whether a sweep would forget that anybody has said such things."""
        return bool(self._hearsay or self._hearsay_before)

    def sweep(self) -> None:
        """What was said before the last sweep is forgotten, as is what it was about."""
        self._hearsay_before, self._hearsay = self._hearsay, Counter()

    def suspect(self, peer: Peer, reason: str) -> None:
        """Another worker says that ``peer`` is dead: have the shell cut it off, and confirm by ``lost``."""
        if peer != self.me and peer not in self.dead and peer not in self._suspects:
            self._suspects.add(peer)
            self.actions.append(Fence(peer, reason))

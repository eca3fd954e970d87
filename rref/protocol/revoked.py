"""Forks that may still be on their way here, and must not be taken when they arrive."""

from __future__ import annotations

from rref.protocol.messages import ForkId, Peer

__all__ = ["Revoked"]


class Revoked:
    """The revoked forks, each with a reason; an entry that two sweeps have seen is forgotten."""

    __slots__ = ("_forks",)

    def __init__(self) -> None:
        self._forks: dict[ForkId, tuple[str, bool]] = {}  # reason, and whether a sweep has seen it

    def __len__(self) -> int:
        return len(self._forks)

    def add(self, fork: ForkId, reason: str) -> None:
        """Revoke ``fork``."""
        self._forks[fork] = (reason, False)

    def pop(self, fork: ForkId) -> str | None:
        """``fork`` has arrived: return why it must not be taken, or None if it may be."""
        found = self._forks.pop(fork, None)
        return None if found is None else found[0]

    def lost(self, peer: Peer) -> None:
        """Forget the forks of ``peer``, which is dead: nothing more will come from it."""
        self._forks = {fork: entry for fork, entry in self._forks.items() if fork[0] != peer}

    def sweep(self) -> None:
        """Forget the entries that the last sweep saw already."""
        self._forks = {fork: (reason, True) for fork, (reason, seen) in self._forks.items() if not seen}

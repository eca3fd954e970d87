"""Forks that may still be on their way here, and must not be taken when they come."""

from __future__ import annotations

from rref.protocol.messages import ForkId, Peer

__all__ = ["Revoked"]


class Revoked:
    """The forks, each with the reason why; an entry that two sweeps have seen is forgotten."""

    __slots__ = ("_forks",)

    def __init__(self) -> None:
        self._forks: dict[ForkId, tuple[str, bool]] = {}  # why, and seen by a sweep

    def __len__(self) -> int:
        return len(self._forks)

    def add(self, fork: ForkId, reason: str) -> None:
        """``fork`` is revoked from now on."""
        self._forks[fork] = (reason, False)

    def pop(self, fork: ForkId) -> str | None:
        """``fork`` has come: why it must not be taken, or none if it may."""
        found = self._forks.pop(fork, None)
        return None if found is None else found[0]

    def lost(self, peer: Peer) -> None:
        """Nothing will come from ``peer`` any more."""
        self._forks = {fork: entry for fork, entry in self._forks.items() if fork[0] != peer}

    def sweep(self) -> None:
        """Forget what the last sweep saw already."""
        self._forks = {fork: (reason, True) for fork, (reason, seen) in self._forks.items() if not seen}

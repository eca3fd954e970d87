"""The other hosts that have copies of a store: which worker keeps the copy of each, and from which other copy
that one gets a version. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Container

__all__ = ["Hosts", "Place"]

Place = tuple[int, int]
"""A copy: the incarnation of the agent that keeps it, and its id."""


class Hosts:
    """The copies of one store. One thread at a time.

    Args:
        is_present: whether the worker with an incarnation is in the group.
    """

    def __init__(self, is_present: Callable[[int], bool]) -> None:
        self._is_present = is_present
        self._copies: dict[str, dict[int, int]] = {}
        """For each host, the workers that have asked, in order, and the ids of the copies that they can keep.
        """
        self._chains: dict[int, dict[int, int]] = {}
        """For each version, by serial, the workers whose copies get it one from another, in order."""

    def copy_at(self, host: str, asking: Place, failed: int | None, second: Place | None) -> Place:
        """Return the copy of a host: that of the first worker there that has asked and lives; ``second``: the
        second copy, if it is there.
        """
        there = self._copies.get(host) or dict([second] if second else [])
        there = {each: copy for each, copy in there.items() if each != failed and self._is_present(each)}
        there.setdefault(*asking)
        self._copies[host] = there
        return next(iter(there.items()))

    def source(
        self, serial: int, asking: Place, failed: Container[int], there: Container[int]
    ) -> Place | None:
        """Return the copy from which another one gets a version; None: from the store.

        Args:
            serial: of the version. The copies form a chain, in the order in which they ask.
            asking: the copy that asks.
            failed: workers that it has not reached, which are passed over.
            there: the serials of the versions that there are.
        """
        self._chains = {each: chain for each, chain in self._chains.items() if each in there}
        chain = self._chains.setdefault(serial, {})
        chain.setdefault(*asking)
        workers = list(chain)
        before = workers[: workers.index(asking[0])]
        found = (each for each in reversed(before) if each not in failed and self._is_present(each))
        return next(((each, chain[each]) for each in found), None)

"""Collectives of ranks on several hosts: through memory within a host, by messages between hosts.

A *domain* is the ranks that share memory; one of them, its *leader*, acts for it. Data that can be reduced or
copied within a domain crosses the network once for each domain: in all-reduce, reduce, broadcast and barrier.
In the others each pair of ranks has its own data, and everything is sent from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from spmd.collectives.between_hosts.network import NetworkCollectives
from spmd.collectives.between_hosts.operation_messages import Channel
from spmd.collectives.one_host.local import LocalCollectives
from spmd.collectives.reductions import Reduction

__all__ = ["HierarchicalCollectives"]


class HierarchicalCollectives:
    """The ``Algorithms`` of a group of several domains, for one rank.

    Args:
        channel: messages between ranks.
        domains: the ranks of each domain, in order; each rank of the group is in one.
        rank: this rank.
        local: the collectives of this rank's domain; None if the rank is alone in it.
        check: called with the rank that is awaited; raises if that will not come.
        longest: maximum size in bytes of a message, the same on all ranks.
    """

    def __init__(
        self,
        channel: Channel,
        domains: Sequence[Sequence[int]],
        rank: int,
        local: LocalCollectives | None,
        check: Callable[[int], object],
        longest: int = 1 << 36,
    ) -> None:
        self._channel = channel
        self._longest = longest
        self._domains = domains
        self._rank = rank
        self._local = local
        self._check = check
        self._mine = next(domain for domain in domains if rank in domain)
        self._size = sum(map(len, domains))
        self._flat = NetworkCollectives(channel, range(self._size), rank, check, longest)
        self._by_leaders: dict[tuple[int, ...], NetworkCollectives] = {}
        self.all_gather, self.gather = self._flat.all_gather, self._flat.gather
        self.reduce_scatter, self.scatter = self._flat.reduce_scatter, self._flat.scatter
        self.all_to_all = self._flat.all_to_all

    def wake(self) -> None:
        """Make the waiting thread check whether the group has failed. From any thread."""
        self._flat.wake()
        for each in list(self._by_leaders.values()):
            each.wake()

    def _leaders(self, root: int) -> tuple[int, NetworkCollectives | None]:
        """Return the leader of this rank's domain, and for a leader the collectives of all leaders; ``root``
        is a leader.
        """
        leaders = tuple(root if root in domain else domain[0] for domain in self._domains)
        mine = root if root in self._mine else self._mine[0]
        if mine != self._rank:
            return mine, None
        found = self._by_leaders.get(leaders)
        if found is None:
            found = NetworkCollectives(self._channel, leaders, self._rank, self._check, self._longest)
            self._by_leaders[leaders] = found
        return mine, found

    def barrier(self, signature: bytes, deadline: float) -> None:
        _, leaders = self._leaders(0)
        if self._local is not None:
            self._local.barrier(signature, deadline)
        if leaders is not None:
            leaders.barrier(signature, deadline)
        if self._local is not None:
            self._local.barrier(signature, deadline)

    def broadcast(self, signature: bytes, deadline: float, tensor: torch.Tensor, root: int) -> None:
        leader, leaders = self._leaders(root)
        if leaders is not None:
            leaders.broadcast(signature, deadline, tensor, root)
        if self._local is not None:
            self._local.broadcast(signature, deadline, tensor, self._mine.index(leader))

    def all_reduce(
        self, signature: bytes, deadline: float, tensor: torch.Tensor, reduction: Reduction
    ) -> None:
        leader, leaders = self._leaders(0)
        self._reduce_in_domain(signature, deadline, tensor, reduction, leader)
        if leaders is not None:
            leaders.all_reduce(signature, deadline, tensor, reduction, self._size)
        if self._local is not None:
            self._local.broadcast(signature, deadline, tensor, self._mine.index(leader))

    def reduce(
        self, signature: bytes, deadline: float, tensor: torch.Tensor, reduction: Reduction, root: int
    ) -> None:
        leader, leaders = self._leaders(root)
        mine = tensor if self._rank == root else tensor.clone()
        self._reduce_in_domain(signature, deadline, mine, reduction, leader)
        if leaders is not None:
            leaders.reduce(signature, deadline, mine, reduction, root, self._size)

    def _reduce_in_domain(
        self, signature: bytes, deadline: float, tensor: torch.Tensor, reduction: Reduction, leader: int
    ) -> None:
        if self._local is None:
            reduction.prepare(tensor)
        else:
            place = self._mine.index(leader)
            self._local.all_reduce(signature, deadline, tensor, reduction, place, last=False)

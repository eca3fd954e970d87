"""The process groups of a view, which all its members form at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Self

from rpc.errors import GivenUpError, RpcError
from rpc.group.peer import Peer
from spmd.collectives.group import Group
from spmd.collectives.node import Node
from spmd.collectives.process_group import FarcallProcessGroup

__all__ = ["FORM_SECONDS", "Groups"]

FORM_SECONDS: Final = 60.0
"""Time in which a group is formed."""


class Groups:
    """The process groups of one view, as one of its members has them. From any thread.

    Attributes:
        votes: of all members.
        sums: of the workers at this one's place in each replica, by the ranks of replicas; the same group as
            ``votes`` if replicas are single workers.
        replica: the workers of this one's replica; None if it is a single worker.
    """

    def __init__(self, votes: Group, sums: Group, replica: Group | None) -> None:
        self.votes = FarcallProcessGroup(votes)
        self.sums = self.votes if sums is votes else FarcallProcessGroup(sums)
        self.replica = replica

    @classmethod
    def form(cls, agent: Any, peers: Sequence[Peer], rank: int, replica_size: int, key: str) -> Self:
        """Form the groups of a view.

        Args:
            agent: this worker's agent.
            peers: the members, by rank: replica after replica.
            rank: this worker's place among them.
            replica_size: number of workers of a replica.
            key: name of the view; no other has it.

        Raises:
            GivenUpError: a member is lost, or has given up.
        """
        formed: list[Group] = []

        def add(workers: Sequence[Peer], among: Sequence[int], mine: int, name: str) -> Group:
            node = Node.of(agent, workers, name, owned=False)
            try:
                group = Group(node, among, among.index(mine), name, FORM_SECONDS)
            except BaseException:
                node.close_if_unused()
                raise
            group.timeout = 0.0
            formed.append(group)
            return group

        try:
            votes = sums = add(peers, range(len(peers)), rank, key)
            if replica_size == 1:
                return cls(votes, sums, None)
            place = rank % replica_size
            sums = add(peers, range(place, len(peers), replica_size), rank, f"{key}/place {place}")
            first = rank - place
            mates = peers[first : first + replica_size]
            return cls(votes, sums, add(mates, range(replica_size), place, f"{key}/replica {first}"))
        except BaseException as error:
            for each in formed:
                each.close()
            if isinstance(error, RpcError):
                raise GivenUpError(f"the group was not formed: {error}") from error
            raise

    @property
    def failed(self) -> bool:
        """Whether votes or sums have failed."""
        return self.votes.group.members.failed or self.sums.group.members.failed

    def abort(self, reason: str) -> None:
        """End votes and sums on all members. The replica's own operations may go on."""
        for each in {self.votes.group, self.sums.group}:
            if not each.members.failed:
                each.abort(reason)

    def discard(self) -> None:
        """Leave all groups: the view was not completed."""
        self.close()
        if self.replica is not None:
            self.replica.close()

    def close(self) -> None:
        """Leave the groups that only the view needs. Idempotent."""
        self.votes.shutdown()
        self.sums.shutdown()

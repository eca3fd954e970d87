"""The process groups of a view, which all its members form at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Self

from rpc.errors import GivenUpError, RpcError
from rpc.group.peer import Peer
from spmd.collectives.formation import end_forming
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
            (name, everybody), *rest = _parts(len(peers), rank, replica_size, key)
            votes = sums = add(peers, everybody, rank, name)
            if not rest:
                return cls(votes, sums, None)
            (name, place), (replica, mates) = rest
            sums = add(peers, place, rank, name)
            among = range(replica_size)
            return cls(votes, sums, add([peers[each] for each in mates], among, mates.index(rank), replica))
        except BaseException as error:
            for each in formed:
                each.close()
            cls.decline(agent, peers, rank, replica_size, key, begun=len(formed) + 1)
            if isinstance(error, RpcError):
                raise GivenUpError(f"the group was not formed: {error}") from error
            raise

    @staticmethod
    def decline(
        agent: Any, peers: Sequence[Peer | None], rank: int, replica_size: int, key: str, *, begun: int = 0
    ) -> None:
        """Tell the other members that this one does not form the groups of a view, so that none waits for it.
        Arguments as for ``form``.

        Args:
            begun: number of the groups that it has formed, or failed to form.
        """
        for name, among in _parts(len(peers), rank, replica_size, key)[begun:]:
            others = [peer for each in among if each != rank and (peer := peers[each]) is not None]
            end_forming(agent.messages.bulk, others, name, name)

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


def _parts(size: int, rank: int, replica_size: int, key: str) -> list[tuple[str, range]]:
    """Return the names of the groups that a member of a view is in, and the ranks of their members."""
    parts = [(key, range(size))]
    if replica_size > 1:
        place = rank % replica_size
        first = rank - place
        parts.append((f"{key}/place {place}", range(place, size, replica_size)))
        parts.append((f"{key}/replica {first}", range(first, first + replica_size)))
    return parts

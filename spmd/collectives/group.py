"""One group of ranks: composes its parts, runs its operations, and ends them when it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import torch

from rpc.bulk.transfer import Transfer
from rpc.group.peer import Peer
from rpc.runtime import waits
from rpc.runtime.blocking import INFINITE
from rpc.runtime.torch_internals import InferenceMode
from spmd.collectives.algorithms import Algorithms
from spmd.collectives.between_hosts.hierarchy import HierarchicalCollectives
from spmd.collectives.between_hosts.operation_messages import Merge
from spmd.collectives.errors import CollectiveError, CollectiveTimeoutError, RanksMissingError
from spmd.collectives.flight_recorder import GroupRecord, Record
from spmd.collectives.formation import COLLECTIVES, close_tags, form
from spmd.collectives.membership import Membership
from spmd.collectives.messages import Messages
from spmd.collectives.node import Node
from spmd.collectives.one_host.board import Board
from spmd.collectives.one_host.local import LocalCollectives, header_bytes
from spmd.collectives.sequencer import Sequencer
from spmd.collectives.signature import text_of
from spmd.collectives.work import GroupWork

if TYPE_CHECKING:
    from spmd.collectives.staged import Staged

__all__ = ["Group"]

Perform = Callable[[Algorithms, bytes, float], object]
"""Performs an operation: takes the group's collectives, the signature, and the deadline."""


_LEAST_BYTES: Final = 64 << 10
"""Minimum size in bytes of a piece of a tensor, and maximum size of the rest of a message."""


class _Channel:
    """Messages of collectives, to and from ranks."""

    def __init__(self, node: Node, peers: Sequence[Peer], tags: Sequence[int]) -> None:
        self._bulk, self._peers, self._tags = node.bulk, peers, tags

    def send(self, rank: int, buffers: list[Any]) -> Transfer:
        return self._bulk.send(self._peers[rank], self._tags[rank] + COLLECTIVES, buffers)

    def post(self, rank: int, into: Any, size: int, merge: Merge | None) -> Transfer:
        return self._bulk.post(self._peers[rank], self._tags[rank] + COLLECTIVES, into, size, merge)


class Group:
    """The group, as one of its ranks sees it. From any thread.

    Args:
        node: the agent, and the world's ranks.
        ranks: the ranks of the group in the world, in order.
        rank: rank of this process in the group.
        name: name of the group, the same on all ranks.
        timeout: timeout in seconds of forming the group, and of each operation; 0 for no limit.

    Attributes:
        ranks: as given.
        record: the group's entry in the flight recorder.
        purpose: what the next operations are for, as observers show it; "" for the program's own.

    Raises:
        CollectiveTimeoutError: a rank has not come in time.
    """

    def __init__(self, node: Node, ranks: Sequence[int], rank: int, name: str, timeout: float) -> None:
        self.node = node
        self.ranks = ranks
        self.timeout = timeout
        peers = [node.peers[each] for each in ranks]
        self._ranks_of = {peer.incarnation: place for place, peer in enumerate(peers)}
        self.members = Membership(name, rank, [peer.name for peer in peers], self._tell_failure)
        self.record = GroupRecord(name, ranks)
        self._closed = self._leaves = False
        self._operation = self.purpose = ""
        self.members.watch(self._write_record)  # first: a thread that is woken next may leave the group
        bulk = node.bulk
        formation = form(bulk, peers, rank, name, node.key, node.shares_memory, timeout or INFINITE)
        tags = formation.tags
        self._close_tags = partial(close_tags, bulk, peers, rank, tags)
        self.messages = Messages(bulk, peers, self.members, tags, node.run_soon, self._record_message)
        self.algorithms = self._build(
            formation.domains, formation.mapping, _Channel(node, peers, tags), peers
        )
        self._sequencer = Sequencer(f"farcall-group-{name}")
        self.messages.begin()
        node.add(self)

    def _build(
        self, domains: Sequence[Sequence[int]], mapping: Any, channel: _Channel, peers: Sequence[Peer]
    ) -> Algorithms:
        members = self.members
        longest = max(_LEAST_BYTES, min(each.member.max_message_bytes for each in peers) - _LEAST_BYTES)
        local = None
        if mapping is not None:
            mine = next(domain for domain in domains if members.rank in domain)
            board = Board(
                mapping, mine, mine.index(members.rank), header_bytes(len(mine)), members.check_collective
            )
            members.watch(board.wake)
            local = LocalCollectives(board)
            if len(domains) == 1:
                return local
        network = HierarchicalCollectives(
            channel, domains, members.rank, local, members.check_collective, longest
        )
        members.watch(network.wake)
        return network

    # ---- operations

    def run(
        self,
        signature: bytes,
        outputs: Sequence[torch.Tensor],
        perform: Perform,
        *,
        blocks: bool,
        timeout: float | None = None,
        inputs: Sequence[torch.Tensor] | None = None,
        staged: Staged | None = None,
    ) -> GroupWork:
        """Run an operation after all earlier ones.

        Args:
            signature: signature of the call.
            outputs: result of the returned work.
            perform: performs it.
            blocks: whether the caller waits for it, so that it may run on this thread.
            timeout: timeout in seconds; None for the group's.
            inputs: tensors that a profiler shows; default: the outputs.
            staged: streams on which it runs, if it has tensors on an accelerator.
        """
        self.members.check()
        limit = self.timeout if timeout is None else timeout
        text = text_of(signature)
        work = GroupWork(
            text, outputs, partial(self._perform, signature, perform, limit), self._sequencer.help
        )
        if staged is not None:
            work.stage(staged, outputs)
        given = outputs if inputs is None else inputs
        work.show(text, given)
        work.record = self.node.recorder.begin(self.record, text, given, outputs, limit)
        if blocks:
            self._sequencer.run(work)
        else:
            self._sequencer.submit(work)
        return work

    def _perform(self, signature: bytes, perform: Perform, limit: float) -> None:
        members = self.members
        members.check()
        deadline = monotonic() + limit if limit > 0 else INFINITE
        self.messages.begun += 1
        try:
            members.check_collective()
            # Not recorded by autograd, and inference tensors may be written on any thread.
            with InferenceMode(True):
                try:
                    with self._waiting(signature):
                        perform(self.algorithms, signature, deadline)
                except RanksMissingError as error:
                    raise self._timed_out(signature, limit, error) from None
        except CollectiveError as error:
            where = f"{text_of(signature)} at {members.describe(members.rank)}"
            members.fail(type(error)(f"{where}: {error}"))
            raise
        except BaseException as error:
            where = f"{text_of(signature)} at {members.describe(members.rank)}"
            members.fail(CollectiveError(f"{where} has ended in {type(error).__name__}: {error}"))
            raise

    def _waiting(self, signature: bytes) -> waits.Waiting:
        """The wait for the other ranks, for observers."""
        self._operation = text_of(signature)
        return waits.waiting(
            f"{self.purpose}, {self._operation}" if self.purpose else self._operation,
            group=self.record.name,
            number=self.messages.begun,
            operation=self._operation,
            ranks=list(self.members.workers),
        )

    def observed(self) -> dict[str, Any]:
        """State for observers: the last collective that this rank has begun."""
        return {"name": self.record.name, "number": self.messages.begun, "operation": self._operation}

    def _timed_out(self, signature: bytes, limit: float, error: RanksMissingError) -> CollectiveTimeoutError:
        members = self.members
        ranks = self.messages.ask_who_is_behind() or error.ranks
        missing = ", ".join(members.describe(each) for each in ranks)
        who = members.describe(members.rank)
        failure = CollectiveTimeoutError(
            f"{text_of(signature)} has timed out after {limit:g} s at {who}, waiting for {missing}; "
            "if they are only slow, give the group a longer timeout to wait"
        )
        failure.ranks = ranks
        members.fail(failure)
        return failure

    # ---- the flight recorder

    def _record_message(self, name: str, tensors: Sequence[torch.Tensor], timeout: float) -> Record | None:
        return self.node.recorder.begin(self.record, name, tensors, tensors, timeout, is_message=True)

    def _write_record(self) -> None:
        if self.members.failed and not self._leaves:
            self.node.recorder.group_failed(self.ranks[self.members.rank])

    # ---- failure, and the end

    def _tell_failure(self, failure: CollectiveError) -> None:
        self.messages.tell_failure(failure)

    def worker_gone(self, peer: Peer, reason: str) -> None:
        """Handle that a worker is gone; called by the node."""
        rank = self._ranks_of.get(peer.incarnation)
        if rank is not None and rank != self.members.rank:
            self.members.leave(rank, reason, died=not peer.has_left)

    def abort(self, reason: str) -> None:
        """End everything on all ranks."""
        self.members.fail(CollectiveError(f"{self.members.describe(self.members.rank)}: {reason}"))

    def agent_closes(self) -> None:
        """Handle that this worker leaves, with all its groups; called by the node."""
        self._leaves = True
        self.messages.close()
        self.members.fail(CollectiveError("this worker's agent has ended"), tell=False)

    @property
    def closed(self) -> bool:
        """Whether this rank has left, or is leaving."""
        return self._leaves

    def close(self) -> None:
        """Leave. Idempotent; operations of other ranks that need this rank fail there."""
        if self._closed:
            return
        self._closed = self._leaves = True
        self.messages.close()
        self.members.fail(CollectiveError("it has been destroyed"), tell=False)
        self._close_tags()
        self.node.remove(self)

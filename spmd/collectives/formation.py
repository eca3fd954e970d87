"""Forming a group: its ranks find out which of them share memory, and map it.

1. Each rank tells all others which group it forms, and on which host it is. Each two ranks agree on the tags
   of their messages: the one with the smaller incarnation has reserved them.
2. On each host the first rank creates the memory. The others listen, and it sends them its descriptor.
3. Each rank tells all others whether it has the memory. If one has not, the ranks of its host use messages.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import msgpack

from rpc.bulk.point_to_point import RESERVED_TAGS, Bulk
from rpc.bulk.shared_memory import fd_channel
from rpc.bulk.shared_memory import memory as shared_memory
from rpc.errors import RpcError, RpcTimeoutError, WorkerLostError
from rpc.group.peer import Peer
from spmd.collectives.errors import CollectiveError, CollectiveTimeoutError
from spmd.collectives.one_host import futex
from spmd.collectives.one_host.board import board_bytes
from spmd.collectives.one_host.local import header_bytes

__all__ = ["COLLECTIVES", "DATA", "NOTES", "Formation", "close_tags", "end_forming", "form"]

COLLECTIVES, NOTES, DATA = _CHANNELS = range(3)
"""Offsets of the tags that a group has with each other rank, from the first of them."""

_FORMING: Final = 2 * RESERVED_TAGS
"""The first tag of groups that are being formed; there are twice as many as reserved ones."""

_TOKEN_BYTES: Final = 16


@dataclass(frozen=True)
class Formation:
    """What all ranks of a group have agreed upon.

    Attributes:
        tags: the first tag of the messages to and from each rank, by rank.
        domains: the ranks that share memory, in order; a domain of one rank shares with none.
        mapping: the memory of this rank's domain, if that has other ranks.
    """

    tags: Sequence[int]
    domains: Sequence[Sequence[int]]
    mapping: shared_memory.Mapping | None


class _Talk:
    """The messages between the ranks of a group while it is formed, in order."""

    def __init__(self, bulk: Bulk, peers: Sequence[Peer], rank: int, tag: int, deadline: float) -> None:
        self._bulk, self._peers, self._rank = bulk, peers, rank
        self._tag, self._deadline = tag, deadline

    def tell(self, rank: int, value: Any) -> None:
        self._bulk.send(self._peers[rank], self._tag, msgpack.packb(value))

    def post(self, rank: int) -> Any:
        """Receive the next message of a rank."""
        with self._unless_given_up(rank):
            return self._bulk.post(self._peers[rank], self._tag)

    @contextlib.contextmanager
    def _unless_given_up(self, rank: int) -> Iterator[None]:
        try:
            yield
        except (RpcTimeoutError, WorkerLostError):
            raise
        except RpcError as error:
            raise CollectiveError(
                f"rank {rank} (worker '{self._peers[rank].name}') has given up forming the group"
            ) from error

    def value(self, message: Any, rank: int) -> Any:
        try:
            with self._unless_given_up(rank):
                buffers = message.wait(max(0.0, self._deadline - monotonic()))
        except RpcTimeoutError:
            message.cancel()
            raise CollectiveTimeoutError(
                f"rank {rank} (worker '{self._peers[rank].name}') has not joined the group in time"
            ) from None
        return msgpack.unpackb(b"".join(buffers))

    def gather(self, values: Sequence[Any]) -> list[Any]:
        """Send each of ``values`` to one rank; returns the values that all ranks send to this one, by
        rank.
        """
        others = [rank for rank in range(len(self._peers)) if rank != self._rank]
        for rank in others:
            self.tell(rank, values[rank])
        said = {rank: self.value(self.post(rank), rank) for rank in others}
        said[self._rank] = values[self._rank]
        return [said[rank] for rank in range(len(self._peers))]

    def reserve(self) -> list[int]:
        """Reserve the tags for messages with each rank for which this one chooses; returns the first of each,
        -1 for the others.

        Of two workers always the same one reserves their tags, so no two groups have any in common.
        """
        me = self._peers[self._rank].incarnation
        return [
            self._bulk.reserve(peer, len(_CHANNELS)) if me < peer.incarnation else -1 for peer in self._peers
        ]


def form(
    bulk: Bulk, peers: Sequence[Peer], rank: int, name: str, key: str, share: bool, timeout: float
) -> Formation:
    """Form a group; all its ranks call this.

    Args:
        bulk: bulk messages of the agent.
        peers: the workers, by rank.
        rank: rank of this process.
        name: name of the group; the same on all ranks.
        key: key of its world, the same on all ranks, so that messages of an earlier group of this name are
            not mistaken for its messages.
        share: whether this rank may share memory.
        timeout: maximum time in seconds to wait for all ranks.

    Raises:
        CollectiveTimeoutError: a rank has not come in time.
        CollectiveError: the ranks do not agree on the group.
        WorkerLostError: a rank is lost.
    """
    talk = _Talk(bulk, peers, rank, _tag(name, key), monotonic() + timeout)
    try:
        return _form(talk, peers, rank, name, share)
    finally:
        end_forming(bulk, [*peers[:rank], *peers[rank + 1 :]], name, key)


def end_forming(bulk: Bulk, others: Iterable[Peer], name: str, key: str) -> None:
    """Tell the other ranks that this one has formed a group, or will not: none goes on waiting for it."""
    for each in others:
        bulk.close_tag(each, _tag(name, key))


def _tag(name: str, key: str) -> int:
    # Two groups of one tag would have to be formed at the same time, by the same workers, in different order;
    # then they find that the names differ.
    return _FORMING + (zlib.crc32(f"{key}/{name}".encode()) >> 1)


def _form(talk: _Talk, peers: Sequence[Peer], rank: int, name: str, share: bool) -> Formation:
    share = share and futex.AVAILABLE and shared_memory.AVAILABLE
    host = peers[rank].member.host if share else secrets.token_hex(8)
    reserved = talk.reserve()
    said = talk.gather([[name, len(peers), host, tag] for tag in reserved])
    for other, (its_name, its_size, _, _) in enumerate(said):
        if (its_name, its_size) != (name, len(peers)):
            raise CollectiveError(
                f"rank {rank} forms process group '{name}' of {len(peers)} ranks, "
                f"but rank {other} '{its_name}' of {its_size}"
            )
    hosts = [each[2] for each in said]
    together = [other for other in range(len(peers)) if hosts[other] == host]
    tags = [mine if mine >= 0 else each[3] for mine, each in zip(reserved, said, strict=True)]
    mapping = _share(talk, rank, together) if len(together) > 1 else None
    has_it = talk.gather([mapping is not None] * len(peers))
    domains: list[list[int]] = []
    for host_name in dict.fromkeys(hosts):
        members = [other for other in range(len(peers)) if hosts[other] == host_name]
        domains.extend([members] if all(has_it[each] for each in members) else [[each] for each in members])
    shares = any(rank in domain and len(domain) > 1 for domain in domains)
    return Formation(tags, sorted(domains), mapping if shares else None)


def close_tags(bulk: Bulk, peers: Sequence[Peer], rank: int, tags: Sequence[int]) -> None:
    """Close the tags of a group that a rank does not take part in any more; see ``Formation``."""
    for other, peer in enumerate(peers):
        for channel in _CHANNELS if other != rank else ():
            bulk.close_tag(peer, tags[other] + channel)


def _share(talk: _Talk, rank: int, together: Sequence[int]) -> shared_memory.Mapping | None:
    """Map the memory that the ranks of a host share; None if this one cannot."""
    size = board_bytes(len(together), header_bytes(len(together)))
    leader, *others = together
    with contextlib.ExitStack() as stack:
        is_leader = rank == leader
        descriptor = _hand_out(talk, others, size, stack) if is_leader else _receive(talk, leader, stack)
        with contextlib.suppress(OSError, shared_memory.SegmentRefused):
            if descriptor is not None:
                shared_memory.check(descriptor, size)
                return shared_memory.Mapping(descriptor, size)
    return None


def _hand_out(talk: _Talk, others: Sequence[int], size: int, stack: contextlib.ExitStack) -> int | None:
    """Create the memory, and send its descriptor to where the others listen; None if it cannot be created."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = shared_memory.create(size)
        stack.callback(os.close, descriptor)
    for other in others:
        name, token = talk.value(talk.post(other), other)
        is_sent = False
        if descriptor is not None and name:
            with contextlib.suppress(OSError), fd_channel.connect(name) as sock:
                fd_channel.send(sock, token, descriptor)
                is_sent = True
        talk.tell(other, is_sent)
    return descriptor


def _receive(talk: _Talk, leader: int, stack: contextlib.ExitStack) -> int | None:
    """Return the descriptor that the first rank of this host has sent; None if it has not arrived."""
    listener, name, token = None, "", secrets.token_bytes(_TOKEN_BYTES)
    with contextlib.suppress(OSError):
        listener, name = fd_channel.listen()
        stack.callback(listener.close)
    talk.tell(leader, [name, token])
    is_sent = talk.value(talk.post(leader), leader)
    with contextlib.suppress(OSError):  # nothing else is there to be accepted
        while listener is not None and is_sent:
            sock = fd_channel.accept(listener)
            if sock is None:
                continue
            shown, descriptor = b"", None
            with sock, contextlib.suppress(OSError):
                shown, descriptor = fd_channel.receive(sock)
            if descriptor is not None:
                stack.callback(os.close, descriptor)
                if secrets.compare_digest(shown, token):
                    return descriptor
    return None

"""Whether the workers that have arrived make a group: plain data, no store.

Every arrival says who the worker is and how large it takes the group to be. The worker of rank 0 looks at
all arrivals that no earlier group has used, and this module tells what they amount to.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from rpc.group.workers import Member

__all__ = ["Arrival", "Complete", "Conflict", "Incomplete", "arrival_of", "examine"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A worker that wants to be in a static group.

    Attributes:
        index: its place in the order of arrivals, from 1.
        member: who it is; its rank is the member's id.
        world_size: how many workers it expects.
        process: which process it is, for people.
    """

    index: int
    member: Member
    world_size: int
    process: str

    def __str__(self) -> str:
        return f"'{self.member.name}' (rank {self.member.id}, {self.process})"

    def pack(self) -> bytes:
        """As a record for the store."""
        packed: bytes = msgpack.packb([self.member.to_wire(), self.world_size, self.process])
        return packed

    @classmethod
    def unpack(cls, index: int, packed: bytes) -> Arrival:
        """The reverse of ``pack``, with the place in the order; raises ``ValueError`` for anything else."""
        try:
            member, world_size, process = msgpack.unpackb(packed)
            return cls(index, Member.from_wire(member), int(world_size), str(process))
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"not an arrival: {packed[:60]!r}") from error


def arrival_of(member: Member, world_size: int) -> Arrival:
    """This process's own arrival, not yet in the order."""
    return Arrival(0, member, world_size, f"process {os.getpid()} on {socket.gethostname()}")


@dataclass(frozen=True, slots=True)
class Complete:
    """Everybody is here: the members by rank."""

    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Nothing is wrong, but these ranks have not arrived."""

    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conflict:
    """These arrivals cannot all be in one group."""

    reason: str
    involved: tuple[Arrival, ...]


def examine(arrivals: Iterable[Arrival], world_size: int) -> Complete | Incomplete | Conflict:
    """Tell what a set of arrivals makes.

    Args:
        arrivals: one per process, in any order.
        world_size: as the worker of rank 0 has it.
    """
    ordered = sorted(arrivals, key=lambda arrival: (arrival.member.id, arrival.index))
    conflict = _conflict(ordered, world_size)
    if conflict is not None:
        return conflict
    missing = set(range(world_size)) - {arrival.member.id for arrival in ordered}
    if missing:
        return Incomplete(tuple(sorted(missing)))
    return Complete(tuple(ordered))


def _conflict(ordered: Sequence[Arrival], world_size: int) -> Conflict | None:
    for arrival in ordered:
        if arrival.world_size != world_size:
            zero = next((each for each in ordered if each.world_size == world_size), None)
            return Conflict(
                f"{arrival} expects a group of {arrival.world_size} workers, but "
                f"{zero or 'rank 0'} one of {world_size}. All must be given the same world_size.",
                (arrival,) if zero is None else (arrival, zero),
            )
        if not 0 <= arrival.member.id < world_size:
            return Conflict(
                f"the rank of {arrival} is outside the group of {world_size}: "
                f"ranks go from 0 to {world_size - 1}.",
                (arrival,),
            )
    return _taken_twice(ordered, "name") or _taken_twice(ordered, "rank")


def _taken_twice(ordered: Sequence[Arrival], what: str) -> Conflict | None:
    first_with: dict[Any, Arrival] = {}
    for arrival in ordered:
        key = arrival.member.name if what == "name" else arrival.member.id
        first = first_with.setdefault(key, arrival)
        if first is not arrival:
            return Conflict(
                f"the {what} {key!r} is not unique: it is claimed by {first} and by {arrival}. "
                f"Every worker needs a {what} of its own.",
                (first, arrival),
            )
    return None

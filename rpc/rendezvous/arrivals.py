"""Arrivals, and whether they form a group: plain data and pure functions.

A worker that wants to join writes an *arrival* to the store: its description, and the size of group that it
expects. Each arrival gets one *verdict*. In a static group, rank 0 writes them when ``examine`` says that all
workers are there or that they cannot form one group; in a dynamic group each worker writes its own.
"""

from __future__ import annotations

import enum
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgpack

from rpc.errors import GroupMismatchError, RendezvousError, RendezvousTimeoutError
from rpc.group.workers import Member, WorkerInfo
from rpc.rendezvous.token import WAYS
from rpc.runtime.legible import legible


@dataclass(frozen=True)
class Group:
    """The outcome of a rendezvous."""

    me: Member  # this worker; its id is final
    members: tuple[Member, ...]  # by id: all of a static group; of a dynamic one those before me, and me
    key: str  # name of this group: the same at all its members, and different for every other group
    static: bool  # whether no worker can join later

    @property
    def others(self) -> tuple[Member, ...]:
        """The members without this worker."""
        return tuple(member for member in self.members if member.incarnation != self.me.incarnation)


@dataclass(frozen=True)
class Pace:
    """Timeouts and intervals of the protocol, in seconds."""

    settle: float = 0.5  # for a conflict that a dying process may resolve
    gather: float = 5.0  # for the rest of a static group after a conflict, so that all are notified
    latecomer: float = 2.0  # between checks whether another worker has one's name or rank
    farewell: float = 10.0  # for the others to read their verdict
    unwritten: float = 1.0  # for an earlier joiner of a dynamic group to write its arrival
    undecided: float = 5.0  # for an earlier joiner to be announced
    answer: float = 7.0  # for a worker of a dynamic group to answer in the log: members look every 2 s


DEFAULT_PACE = Pace()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A worker that wants to join."""

    index: int  # its place in the order of arrivals, from 1; 0 before it has one
    member: Member  # in a static group its id is its rank, in a dynamic one it may be -1
    world_size: int  # how many workers it expects; 0 in a dynamic group
    process: str  # description of the process, for messages

    @classmethod
    def of(cls, member: Member, world_size: int) -> Arrival:
        """Make this process's own arrival, not yet in the order."""
        return cls(0, member, world_size, f"process {os.getpid()} on {socket.gethostname()}")

    def __str__(self) -> str:
        rank = f"rank {self.member.id}, " if self.member.id >= 0 else ""
        return f"'{self.member.name}' ({rank}{self.process})"

    def pack(self) -> bytes:
        """Encode it as a record for the store."""
        return bytes(msgpack.packb([self.member.to_wire(), self.world_size, self.process]))

    @classmethod
    def unpack(cls, index: int, packed: bytes) -> Arrival:
        """Decode a record, with its place in the order; raises ``ValueError`` for anything else."""
        try:
            member, world_size, process = msgpack.unpackb(packed)
            return cls(index, Member.from_wire(member), int(world_size), str(process))
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"not an arrival: {packed[:60]!r}") from error

    @classmethod
    def claimed(cls, index: int, packed: bytes) -> Arrival | None:
        """Decode an arrival that is not sealed with this job's token; None if it is malformed. Of its
        addresses only those on this host are kept, so that nobody can make others connect to arbitrary
        addresses.
        """
        try:
            arrival = cls.unpack(index, packed)
        except ValueError:
            return None
        near = tuple(each for each in arrival.member.addresses if each.startswith(("unix:", "sign:")))
        member = replace(arrival.member, addresses=near)
        return replace(arrival, member=member, process=legible(arrival.process))


class ArrivalKind(enum.StrEnum):
    """The outcome of an arrival; the detail of its verdict is given here in brackets."""

    COMPLETE = "complete"  # its static group is complete (the group's key)
    ANNOUNCED = "announced"  # it is known in a dynamic group, and has not met a member yet (as for MEMBER)
    MEMBER = "member"  # it is in a dynamic group (its id, and a question to it, if any)
    GONE = "gone"  # it left, died or never finished joining (nothing)
    MISMATCH = "mismatch"  # it cannot be in the group (the reason)
    TIMEOUT = "timeout"  # the others have not arrived (which)
    INTERRUPTED = "interrupted"  # rank 0 no longer waits (a text that says so)
    FOREIGN = "foreign"  # the verdict was given with another token (a text that says so); never written


_PRESENT: Final = frozenset({ArrivalKind.ANNOUNCED, ArrivalKind.MEMBER})

_ERRORS: dict[ArrivalKind, type[RendezvousError]] = {
    ArrivalKind.MISMATCH: GroupMismatchError,
    ArrivalKind.TIMEOUT: RendezvousTimeoutError,
    ArrivalKind.INTERRUPTED: RendezvousError,
    ArrivalKind.FOREIGN: GroupMismatchError,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of an arrival, with its detail; see ``ArrivalKind``."""

    kind: ArrivalKind
    detail: str = ""

    def raise_if_refused(self) -> None:
        """Raise this verdict's error, if its worker is refused."""
        if self.kind in _ERRORS:
            raise _ERRORS[self.kind](self.detail)

    @property
    def is_present(self) -> bool:
        """Whether the worker is a member of a dynamic group, or about to become one."""
        return self.kind in _PRESENT

    @property
    def worker_id(self) -> int:
        """The id of a worker of a dynamic group."""
        return int(self.detail.partition(" ")[0])

    @property
    def question(self) -> str:
        """The question to that worker by those that have lost it; empty if there is none."""
        return self.detail.partition(" ")[2]

    def asking(self, question: str) -> Verdict:
        """Return the same verdict with a question, or without."""
        return replace(self, detail=f"{self.worker_id} {question}" if question else str(self.worker_id))

    def pack(self) -> bytes:
        """Encode it as a record for the store."""
        return bytes(msgpack.packb([self.kind.value, self.detail]))

    @classmethod
    def unpack(cls, packed: bytes) -> Verdict:
        """Decode a record."""
        kind, detail = msgpack.unpackb(packed)
        return cls(ArrivalKind(kind), str(detail))

    @classmethod
    def claimed(cls, packed: bytes) -> Verdict:
        """Decode a verdict that is not sealed with this job's token. It counts only if it says that a worker
        is gone, since a process that can write to the store can keep workers from joining anyway.
        """
        try:
            said = cls.unpack(packed)
        except (TypeError, ValueError, msgpack.UnpackException):
            return FOREIGN
        return said if said.kind is ArrivalKind.GONE else FOREIGN


FOREIGN = Verdict(
    ArrivalKind.FOREIGN,
    f"another worker in this group's store has another token than this one. Workers of one user on one host "
    f"find the same by themselves; others do not. {WAYS}",
)


def foreign(arrival: Arrival) -> str:
    """Return why there can be no group with a worker that has another token."""
    return (
        f"{arrival} has another token than the others that meet here. Workers of one user on one host find "
        f"the same by themselves; others do not. {WAYS}"
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the log of arrivals."""

    index: int
    arrival: Arrival | None  # None: not written (yet)
    verdict: Verdict | None  # None: not decided (yet)
    foreign: Arrival | None = None  # an arrival in its place that is sealed with another token

    @property
    def is_present(self) -> bool:
        """Whether it is a member of a dynamic group, or about to become one."""
        return self.verdict is not None and self.verdict.is_present

    @property
    def is_established(self) -> bool:
        """Whether it is a member of a dynamic group."""
        return self.verdict is not None and self.verdict.kind is ArrivalKind.MEMBER

    @property
    def settled(self) -> bool:
        """Whether it is irrelevant to all later arrivals, for ever."""
        return self.verdict is not None and self.verdict.kind not in (*_PRESENT, ArrivalKind.FOREIGN)

    def member(self) -> Member | None:
        """The worker of a dynamic group, with its id."""
        if self.arrival is None or self.verdict is None or not self.is_present:
            return None
        member = self.arrival.member
        return replace(member, info=WorkerInfo(member.name, self.verdict.worker_id))


@dataclass(frozen=True, slots=True)
class Conflict:
    """Reports arrivals that cannot all be in one group."""

    reason: str
    involved: tuple[Arrival, ...]


def examine(arrivals: Iterable[Arrival], world_size: int) -> tuple[Arrival, ...] | Conflict | None:
    """Return the static group that the arrivals form, by rank; or a conflict; or None if it is incomplete. Of
    several arrivals of one incarnation the last counts. ``world_size`` is that of rank 0.
    """
    latest = {each.member.incarnation: each for each in sorted(arrivals, key=lambda each: each.index)}
    ordered = sorted(latest.values(), key=lambda each: (each.member.id, each.index))
    complete = tuple(ordered) if len(ordered) == world_size else None
    return _conflict(ordered, world_size) or complete


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
    claimed: dict[tuple[str, object], Arrival] = {}
    for arrival in ordered:
        apart = next((each for each in ordered if each.member.host != arrival.member.host), None)
        if apart is not None and is_near_only(arrival.member):
            return Conflict(
                f"{apart} cannot reach {arrival}, which is on another host, or in another network namespace, "
                "and listens for workers on its own host only. Give each an address by the option listen=.",
                (arrival, apart),
            )
        for what, key in ("name", arrival.member.name), ("rank", arrival.member.id):
            first = claimed.setdefault((what, key), arrival)
            if first is not arrival:
                return Conflict(
                    f"the {what} {key!r} is not unique: it is claimed by {first} and by {arrival}. "
                    f"Every worker needs a {what} of its own.",
                    (first, arrival),
                )
    return None


def is_near_only(member: Member) -> bool:
    """Whether only workers on its own host can reach it."""
    return bool(member.addresses) and all(each.startswith("unix:") for each in member.addresses)


WHAT_TO_CHECK: Final = (
    "Check that every worker was started, and with the same world size, rendezvous address and job."
)
"""Advice for errors about missing ranks."""


def describe_ranks(present: Iterable[int], world_size: int) -> str:
    """List the ranks that have arrived, and those that are missing."""

    def listed(ranks: Sequence[int]) -> str:
        shown = ", ".join(map(str, ranks[:20]))
        return f"{shown} and {len(ranks) - 20} more" if len(ranks) > 20 else shown or "none"

    here = sorted(set(present))
    missing = sorted(set(range(world_size)) - set(here))
    return f"Ranks that arrived: {listed(here)}; missing: {listed(missing)}."


def mixed(what: str, names: Iterable[str]) -> str:
    """Return why a worker cannot join beside living workers of the other kind of group."""
    return (
        f"RPC group mixes statically and dynamically initialized members which is not supported. Here "
        f"{what} lives in the same store and job: {', '.join(names)}. Pass the same world_size to all "
        f"workers or to none, or give the groups different jobs (FARCALL_JOB)."
    )

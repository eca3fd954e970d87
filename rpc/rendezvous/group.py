"""What a group is and what a worker knows of it before it joins: rank, world size, job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from rpc.errors import GroupMismatchError, RendezvousError
from rpc.group.workers import Member

__all__ = ["Group", "Place", "job_key", "resolve_group"]


@dataclass(frozen=True)
class Group:
    """The outcome of a rendezvous.

    Attributes:
        me: this worker; its id is final.
        members: all members of a static group, by id; those of a dynamic group that joined before, and me.
        key: names this group; the same text at all its members, and another for every other group.
        static: whether nobody can join later.
    """

    me: Member
    members: tuple[Member, ...]
    key: str
    static: bool

    @property
    def others(self) -> tuple[Member, ...]:
        """The members without this worker."""
        return tuple(member for member in self.members if member.incarnation != self.me.incarnation)


@dataclass(frozen=True)
class Place:
    """A worker's place in the group, as far as arguments and environment tell.

    Attributes:
        rank: ``None`` if a dynamic group is to choose it.
        world_size: ``None`` for a dynamic group.
        single_host: all workers are known to be on this host.
    """

    rank: int | None
    world_size: int | None
    single_host: bool = False

    @property
    def static(self) -> bool:
        """Whether the group's size is known."""
        return self.world_size is not None


def job_key(environ: Mapping[str, str]) -> str:
    """What separates jobs that share a store: ``FARCALL_JOB``, else torchrun's run id, else ``default``.

    torchrun's restart count is left out on purpose: after a restart it differs between nodes.
    """
    return environ.get("FARCALL_JOB") or environ.get("TORCHELASTIC_RUN_ID") or "default"


def resolve_group(
    rank: int | None,
    world_size: int | None,
    environ: Mapping[str, str],
    dynamic: bool = False,
    init_method: str = "",
) -> Place:
    """Settle rank and world size: an argument counts before ``init_method``, that before the environment.

    Args:
        rank: the argument; ``None`` or -1 if it was left out.
        world_size: the argument; ``None``, 0 or -1 if it was left out.
        environ: the environment, with ``RANK`` and ``WORLD_SIZE`` as torchrun sets them.
        dynamic: a dynamic group is asked for, whatever ``WORLD_SIZE`` says. Then the rank may be unknown.
        init_method: may carry ``?rank=R&world_size=W``.

    Returns:
        The worker's place. Without a world size the group is dynamic.

    Raises:
        GroupMismatchError: the rank is missing or outside the group, a value is not a number, or a world
            size was given for a group that is asked to be dynamic.
        TypeError: the rank or world size given is no integer.
    """
    rank, world_size = _integer("rank", rank), _integer("world_size", world_size)
    query = parse_qs(urlsplit(init_method).query)
    rank = None if rank is None or rank == -1 else rank
    world_size = None if world_size is None or world_size in (0, -1) else world_size
    if rank is None:
        rank = _from_query("rank", query, init_method) if "rank" in query else _from_env("RANK", environ)
    if dynamic:
        if world_size is not None:
            raise GroupMismatchError(
                f"init_rpc got world_size={world_size} and the option dynamic=True; "
                f"a dynamic group has no size: leave out one of them."
            )
    elif world_size is None:
        if "world_size" in query:
            world_size = _from_query("world_size", query, init_method)
        else:
            world_size = _from_env("WORLD_SIZE", environ)
    if rank is None and not dynamic:
        raise GroupMismatchError(
            "rank parameter missing: init_rpc got no rank, and environment variable RANK expected in its "
            "place is not set. Pass rank=, start under torchrun, or ask with the option dynamic=True for a "
            "group that numbers its workers itself."
        )
    if world_size is not None and world_size <= 0:
        raise GroupMismatchError(f"the world size must be positive, got {world_size}")
    if rank is not None and (rank < 0 or (world_size is not None and rank >= world_size)):
        limit = "not be negative" if world_size is None else f"be from 0 to {world_size - 1}"
        raise GroupMismatchError(
            f"the rank must {limit}"
            + (f" in a group of {world_size}" if world_size is not None else "")
            + f", got {rank}. What is not passed to init_rpc is read from RANK and WORLD_SIZE."
        )
    single_host = world_size is not None and environ.get("LOCAL_WORLD_SIZE") == environ.get(
        "WORLD_SIZE"
    ) == str(world_size)
    return Place(rank, world_size, single_host)


def _integer(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}")
    return int(value)


def _from_env(variable: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(variable)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise GroupMismatchError(f"environment variable {variable} must be a number, is {text!r}") from None


def _from_query(name: str, query: Mapping[str, list[str]], init_method: str) -> int:
    try:
        return int(query[name][0])
    except ValueError:
        raise RendezvousError(f"{name} in init_method must be a number: {init_method!r}") from None

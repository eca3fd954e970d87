"""The present and former members of the group, and how callees are named: plain data, no I/O.

A worker is *present* from the moment its description is known until it is lost (it died, or was cut off) or
left. An incarnation that is gone stays gone: nothing brings it back, and messages that still come from it are
refused. A worker that returns under its old name is a new incarnation and takes the name over.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final

from rpc.errors import GroupMismatchError, UnknownWorkerError, WorkerLostError
from rpc.group.workers import Member, WorkerInfo

__all__ = ["Membership", "WorkerReference"]

_NAMED: Final = 8
"""Maximum number of workers named in an error about an unknown one."""

MAX_GONE: Final = 1 << 16
"""Maximum number of incarnations that are remembered as gone. One that is forgotten would be accepted as a
newcomer if it were still running.
"""

_LONG_AGO: Final = "it left long ago"

WorkerReference = str | int | WorkerInfo
"""A callee: its name, its id (rank), or its ``WorkerInfo``."""


class Membership:
    """One worker's view of the group. Changed by one thread at a time; others read a consistent state. A
    ``static`` group accepts no members after it was formed.
    """

    def __init__(self, me: Member, *, static: bool) -> None:
        self.me = me
        self.static = static
        self._by_name: dict[str, Member] = {}
        self._by_id: dict[int, Member] = {}
        self._by_incarnation: dict[int, Member] = {}
        self._gone: dict[int, str] = {}
        self._add(me)

    def join(self, member: Member) -> bool:
        """Add a member; returns whether it is new. Raises ``WorkerLostError`` if this incarnation is gone
        already, ``GroupMismatchError`` if a present worker has its name or id.
        """
        if member.incarnation in self._by_incarnation:
            return False
        if member.incarnation in self._gone:
            raise WorkerLostError(
                f"worker '{member.name}' (incarnation {member.incarnation:x}) was given up: "
                f"{self._gone[member.incarnation]}. It must start again to take part.",
                member.name,
                self._gone[member.incarnation],
            )
        for other in self.rivals(member):
            what = f"name '{member.name}'" if other.name == member.name else f"id {member.id}"
            raise GroupMismatchError(f"the {what} is taken by worker '{other.name}' (id {other.id})")
        self._add(member)
        return True

    def rivals(self, member: Member) -> list[Member]:
        """Return the present members that have its name or id, but another incarnation."""
        named = dict.fromkeys((self._by_name.get(member.name), self._by_id.get(member.id)))
        there = [each for each in named if each is not None and each.incarnation in self._by_incarnation]
        return [each for each in there if each.incarnation != member.incarnation]

    def _add(self, member: Member) -> None:
        self._by_name[member.name] = member
        self._by_id[member.id] = member
        self._by_incarnation[member.incarnation] = member

    def leave(self, incarnation: int, reason: str) -> Member | None:
        """Record that a member is gone; returns it, or None if it was not present."""
        self._gone.setdefault(incarnation, reason)
        if len(self._gone) > MAX_GONE and not self.static:
            del self._gone[next(iter(self._gone))]
        return self._by_incarnation.pop(incarnation, None)

    def forget(self, incarnation: int) -> None:
        """Forget a member that left long ago, except that it is gone: it will not be named any more."""
        if incarnation in self._gone:
            self._gone[incarnation] = _LONG_AGO
        self._by_name = {key: each for key, each in self._by_name.items() if each.incarnation != incarnation}
        self._by_id = {key: each for key, each in self._by_id.items() if each.incarnation != incarnation}

    def gone_reason(self, incarnation: int) -> str | None:
        """Return why an incarnation is gone; None if it was never here or is present."""
        return self._gone.get(incarnation)

    def find(self, incarnation: int) -> Member | None:
        """Return the present member with this incarnation, or None."""
        return self._by_incarnation.get(incarnation)

    def present(self) -> list[Member]:
        """Return all present members, including this worker, by id."""
        return sorted(self._by_incarnation.values(), key=lambda member: member.id)

    def infos(self) -> list[WorkerInfo]:
        """Return the members: in a static group all that formed it, gone or not; otherwise those that are
        present.
        """
        if self.static:
            return [member.info for _, member in sorted(self._by_id.items())]
        return [member.info for member in self.present()]

    def resolve(self, callee: WorkerReference) -> Member:
        """Return the member that a callee names, present or gone. Raises ``UnknownWorkerError`` if it was
        never in the group, ``ValueError`` if ``callee`` is neither str, int nor ``WorkerInfo``.
        """
        member: Member | None
        match callee:
            case str():
                member = self._by_name.get(callee)
            case WorkerInfo(name, worker_id):
                member = self._by_name.get(name)
                if member is not None and member.id != worker_id:
                    member = None
            case int() if type(callee) is not bool:
                member = self._by_id.get(callee)
            case _:
                raise ValueError(f"a callee is a name, an id or a WorkerInfo, not {type(callee).__name__}")
        if member is None:
            raise UnknownWorkerError(
                f"Unknown destination worker: could not find destination {callee!r}. "
                + self._alternatives(callee)
            )
        return member

    def _alternatives(self, callee: WorkerReference) -> str:
        """Describe the workers that there are, for the error about one that there is not."""
        infos = self.infos()
        name = callee if isinstance(callee, str) else getattr(callee, "name", "")
        close = get_close_matches(name, [info.name for info in infos], 1)
        meant = f"Did you mean '{close[0]}'? " if close else ""
        named = ", ".join(f"'{info.name}' (id {info.id})" for info in infos[:_NAMED])
        more = f" and {len(infos) - _NAMED} more" if len(infos) > _NAMED else ""
        return f"{meant}The group of '{self.me.name}' has {named}{more}."

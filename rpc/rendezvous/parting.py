"""Which workers are in a dynamic group when some cannot reach each other: pure decisions, without I/O.

*Newcomers.* A worker that joins is first *announced*: those that join later find it in the log. It becomes a
*member* when it has met one, that is, when a connection to it is established; or when it has found no living
worker, and founds the group. Until then it removes no worker from the log. A newcomer that cannot reach any
member of a group that may live is refused: it cannot tell whether the members or the network to them are
gone.

*Members* that lose each other may all live. Each *part* of the group whose members still reach each other is
led by its oldest member, the first in the log. It removes the workers that it has lost from the log, but asks
each of them in the log first, unless the kernel of this host says that the process has ended: a firewall can
refuse connections as the kernel of a dead process does. A member that is asked answers if its own part
outweighs the asking one, and otherwise leaves. A part whose question is answered leaves. So the larger part
stays, of equal ones the older; a member that is stopped, or does not reach the store, does not answer and is
removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from rpc.rendezvous.arrivals import Verdict

__all__ = ["Action", "Admission", "Contact", "Part", "admission", "is_conflict", "parting"]


class Contact(Enum):
    """A newcomer's contact to another worker."""

    MET = "there is, or was, a connection to it"
    TRYING = "an attempt to connect is under way, or it was asked in the log and may still answer"
    LOST = "it cannot be reached, and may live"
    DEAD = "its process has ended"


class Admission(Enum):
    """The outcome for a newcomer."""

    JOINED = "it has met a member"
    FOUNDED = "no earlier worker lives, and no member: it founds the group"
    WAIT = "that depends on workers which are joining, or were asked"
    REFUSED = "there are members that may live, and it has met none"


def admission(others: Iterable[tuple[bool, Contact]]) -> Admission:
    """Decide about a newcomer.

    others: for each worker before it in the log, and each member after it, whether it is a member, and the
        newcomer's contact to it.
    """
    found = [(is_member, contact) for is_member, contact in others if contact is not Contact.DEAD]
    members = {contact for is_member, contact in found if is_member}
    if Contact.MET in members:
        return Admission.JOINED
    if Contact.LOST in members and Contact.TRYING not in members:
        return Admission.REFUSED
    return Admission.WAIT if found else Admission.FOUNDED


@dataclass(frozen=True)
class Part:
    """Members of a group that reach each other: their incarnations, and the leader's place in the log."""

    place: int
    members: frozenset[int]

    def outweighs(self, other: Part) -> bool:
        """Whether this part stays, of two that have lost each other. Members in both count for the other one,
        which asks and therefore knows better which workers it reaches.
        """
        return (len(self.members - other.members), -self.place) > (len(other.members), -other.place)

    def question(self) -> str:
        """The question of this part to a worker that it has lost."""
        return f"{self.place} " + ",".join(f"{each:x}" for each in sorted(self.members))

    @classmethod
    def that_asks(cls, question: str) -> Part:
        """Parse a ``question``."""
        place, members = question.split(" ")
        return cls(int(place), frozenset(int(each, 16) for each in members.split(",")))


class Action(Enum):
    """The action for a lost worker in the log."""

    REMOVE = "take it out of the log"
    ASK = "ask it in the log"
    WAIT = "give it time to answer"
    YIELD = "it has answered: its part is the group"
    NOTHING = "it is out already"


def parting(verdict: Verdict | None, asked: str | None, *, ended: bool, is_late: bool) -> Action:
    """Decide about a lost worker.

    verdict: its current verdict; None if it has none from this job's workers.
    asked: the question that this worker has asked it; None if it has asked none.
    ended: whether its process has ended, or it said goodbye.
    is_late: whether the time to answer the current question has expired.
    """
    if verdict is None or not verdict.is_present:
        return Action.NOTHING
    if ended:
        return Action.REMOVE
    if verdict.question:
        return Action.REMOVE if is_late else Action.WAIT
    return Action.ASK if asked is None else Action.YIELD


def is_conflict(name: str, worker_id: int, present: Collection[tuple[str, int]]) -> bool:
    """Whether a worker has the name or id of another one."""
    return any(name == other or worker_id == other_id for other, other_id in present)

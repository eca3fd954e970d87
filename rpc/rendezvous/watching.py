"""The actions of a worker of a dynamic group each time it reads the log: the I/O around ``parting``.

*Its own entry.* It answers a question there, and leaves the group if it was removed. An entry that was
deleted or overwritten is written again.

*Others.* It connects to those that it does not know: they could not connect to it, or the log was damaged
when they joined. It becomes a member, or is refused, as ``admission`` says. As the leader of its part, it
removes the workers that the part has lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from rpc.errors import NotAdmittedError, RendezvousTimeoutError
from rpc.group.workers import Member
from rpc.rendezvous.address import Probe
from rpc.rendezvous.arrivals import Arrival, ArrivalKind, Entry, Pace, Verdict
from rpc.rendezvous.dynamic import DynamicGroup
from rpc.rendezvous.log import Log, OwnRecord
from rpc.rendezvous.parting import Action, Admission, Contact, Part, admission, is_conflict, parting
from rpc.rendezvous.store import StoreWait

__all__ = ["LogWatch", "Neighbours", "PutOut"]

logger = logging.getLogger(__name__)

_GONE = Verdict(ArrivalKind.GONE)

_SHOWN = 5
"""Maximum number of workers named in an error."""


class Neighbours(Protocol):
    """The other workers, as a worker's agent knows them. Called on the keeper's thread; never blocks."""

    def roster(self) -> Sequence[Member]:
        """Return the known workers in the group, including this one."""

    def has_met(self, incarnation: int) -> bool:
        """Whether there is or was a connection to a worker that is not lost."""

    def gone_reason(self, incarnation: int) -> str | None:
        """Return why a worker is lost; None if it is not."""

    def meet(self, members: Sequence[Member]) -> object:
        """Connect to workers that were not known."""

    def put_out(self, reason: str) -> object:
        """Lose all others: this worker is no longer in its group."""


class PutOut(Exception):
    """This worker is no longer in its group; the text says why."""


class _Question(NamedTuple):
    """A question that was found at a place in the log."""

    text: str
    since: float


class LogWatch:
    """One worker's view of the log. For one thread; ``StoreLost`` passes through.

    Args:
        group: the group as this worker has joined it.
        neighbours: the other workers.
        waiting: deadline for becoming a member.
        tell: returns whether a worker's address answers.
        pace: timeouts for workers' answers.
        clock: returns the time in seconds.

    Attributes:
        places: places of this worker in the log.
        is_member: whether it has become a member.
        is_pending: whether the log should be read again soon.
    """

    def __init__(
        self,
        group: DynamicGroup,
        neighbours: Neighbours,
        waiting: StoreWait,
        tell: Probe,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.me = group.me
        self.places = {group.place}
        self.is_member = not group.others
        self.is_pending = not self.is_member
        self._store = group.store
        self._first_met = group.established
        self._neighbours = neighbours
        self.waiting = waiting
        self._tell = tell
        self._pace = pace
        self._clock = clock
        self._read: Log | None = None
        self._left: set[int] = set()
        self._strangers: frozenset[int] = frozenset()
        self._questions: dict[int, _Question] = {}
        self._asked: dict[int, str] = {}

    def worker_left(self, incarnation: int) -> None:
        """Record that a worker has said goodbye."""
        self._left.add(incarnation)

    def start_again(self, places: set[int]) -> None:
        """Continue with another store, where this worker has these places."""
        self.places, self._read = places, None
        self._questions.clear()
        self._asked.clear()

    @property
    def _log(self) -> Log:
        """Return the log, with what was read of it; it is made on the keeper's thread, since that uses the
        store.
        """
        if self._read is None:
            self._read = Log(self._store)
        return self._read

    def verdict(self) -> Verdict:
        """Return the verdict that this worker's arrival should have."""
        return Verdict(ArrivalKind.MEMBER if self.is_member else ArrivalKind.ANNOUNCED, str(self.me.id))

    def look(self) -> None:
        """Read the log and act on it.

        Raises:
            PutOut: other workers have removed this one, or it has to leave.
            NotAdmittedError, RendezvousTimeoutError: it cannot become a member.
        """
        self._look_at_own_places()
        self._log.read()
        if self._log.end <= max(self.places):
            self._log.count_up_to(max(self.places))
        for entry in self._log.entries():
            if entry.verdict is None:
                self._log.entry(entry.index)
        entries = self._log.entries()
        self._meet_strangers(entries)
        if self.is_member:
            self._part_with_lost(entries)
        else:
            self._become_member(entries)

    # ---- this worker's own entry

    def _look_at_own_places(self) -> None:
        damaged = set()
        for place in sorted(self.places):
            record, verdict = self._log.own(place, self.me.incarnation)
            if record is OwnRecord.INTACT and verdict is not None:
                self._answer(place, verdict)
            else:
                damaged.add(place)
                if record is not OwnRecord.TAKEN:
                    self._log.remove(place)
        if not damaged:
            return
        self.places -= damaged
        while not self.places:  # append at the end, where all see it: others may have passed the old place
            self._log.count_up_to(max(damaged))
            place = self._log.append(Arrival.of(self.me, 0))
            if self._log.decide(place, self.verdict()) == self.verdict():
                self.places.add(place)
        self._read = None
        logger.warning(
            "the entry of worker '%s' in %s was deleted or overwritten; it is written again",
            self.me.name,
            self._store.description,
        )

    def _answer(self, place: int, verdict: Verdict) -> None:
        if verdict.kind is ArrivalKind.GONE:
            raise self._out("others had lost it, and have removed it from the group")
        if not verdict.question:
            return
        asking = Part.that_asks(verdict.question)
        if not self._part(self._log.entries()).outweighs(asking):
            raise self._out(
                "others had lost it, and their part of the group is larger, or as large and older"
            )
        self._log.swap(place, verdict, self.verdict())

    def _out(self, why: str) -> PutOut | NotAdmittedError:
        return PutOut(why) if self.is_member else self._refused(why)

    # ---- others

    def _part(self, entries: Sequence[Entry]) -> Part:
        """Return this worker and those that it has met, as far as they are in the log."""
        met = {each.incarnation for each in self._neighbours.roster() if self._has_met(each.incarnation)}
        met.add(self.me.incarnation)
        places = [each.index for each in entries if _incarnation(each) in met]
        return Part(min([*places, *self.places]), frozenset(met))

    def _has_met(self, incarnation: int) -> bool:
        return self._neighbours.gone_reason(incarnation) is None and self._neighbours.has_met(incarnation)

    def _meet_strangers(self, entries: Sequence[Entry]) -> None:
        """Connect to workers that are unknown for the second time: most newcomers connect by themselves."""
        roster = self._neighbours.roster()
        known = {each.incarnation for each in roster} | {self.me.incarnation}
        taken = {(each.name, each.id) for each in roster}
        unknown = {
            incarnation: entry.index
            for entry in entries
            if (incarnation := _incarnation(entry)) is not None
            and incarnation not in known
            and self._neighbours.gone_reason(incarnation) is None
        }
        again = [self._log.entry(unknown[each]).member() for each in unknown if each in self._strangers]
        self._strangers = frozenset(unknown)
        found = [each for each in again if each and not is_conflict(each.name, each.id, taken)]
        if found:
            self._neighbours.meet(found)

    def _part_with_lost(self, entries: Sequence[Entry]) -> None:
        """Remove the workers that this part of the group has lost from the log, if this worker leads it."""
        here = {each.incarnation for each in self._neighbours.roster()}
        logged = [each for each in entries if _incarnation(each) in here]
        lost = [
            entry
            for entry in entries
            if (incarnation := _incarnation(entry)) is not None
            and incarnation not in here
            and incarnation != self.me.incarnation
            and (
                self._neighbours.gone_reason(incarnation) is not None
                or (incarnation in self._strangers and self._has_taken_name(entry, logged))
            )
        ]
        part = self._part(entries)
        self.is_pending = bool(lost) and part.place in self.places
        if not self.is_pending:
            self._asked.clear()
            return
        for entry in lost:
            match self._parting(entry.index, part):
                case Action.YIELD:
                    member = entry.member()
                    raise PutOut(
                        f"it has lost '{member.name if member else '?'}', and the group goes on there"
                    )
                case Action.REMOVE:
                    now = self._log.verdict(entry.index)
                    if now is not None and now.is_present:
                        self._log.swap(entry.index, now, _GONE)
                        self._log.entry(entry.index)
        self._log.trim()

    def _has_taken_name(self, stranger: Entry, logged: Sequence[Entry]) -> bool:
        """Whether a worker has the name or id of another one. If that one is not in the log any more, it has
        ended, which this worker has not noticed yet.
        """
        member = stranger.member()
        if member is None:
            return False
        return any(
            self._log.entry(entry.index).is_present
            for entry in logged
            if (other := entry.member()) is not None
            and is_conflict(member.name, member.id, {(other.name, other.id)})
        )

    def _parting(self, index: int, part: Part) -> Action:
        """Return what to do about a lost worker, and ask it if necessary."""
        entry = self._log.entry(index)
        member, verdict, now = entry.member(), entry.verdict, self._clock()
        if member is None or verdict is None:
            return Action.NOTHING
        question = self._questions.get(index)
        if verdict.question and (question is None or question.text != verdict.question):
            question = self._questions[index] = _Question(verdict.question, now)
        is_late = question is not None and now - question.since >= self._pace.answer
        action = parting(verdict, self._asked.get(index), ended=self._has_ended(member), is_late=is_late)
        if action is Action.ASK:
            asking = verdict.asking(part.question())
            if self._log.swap(index, verdict, asking) == asking:
                self._asked[index] = asking.question
                self._questions[index] = _Question(asking.question, now)
            return Action.WAIT
        return action

    def _has_ended(self, member: Member) -> bool:
        """Whether that is certain: on this host the kernel knows, but a firewall may refuse for
        another host.
        """
        return member.incarnation in self._left or (
            member.host == self.me.host and self._tell(member) is False
        )

    # ---- becoming a member

    def _become_member(self, entries: Sequence[Entry]) -> None:
        others: list[Member] = []
        if any(self._has_met(each) for each in self._first_met):
            outcome = Admission.JOINED
        else:
            found = []
            for entry in [self._log.entry(each.index) for each in entries]:
                member = entry.member()
                if member is None or entry.index in self.places:
                    continue
                if entry.index > min(self.places) and not entry.is_established:
                    continue  # it waits for this worker
                others.append(member)
                found.append((entry.is_established, self._contact(entry.index, member)))
            outcome = admission(found)
        match outcome:
            case Admission.JOINED | Admission.FOUNDED:
                announced = self.verdict()
                member_now = Verdict(ArrivalKind.MEMBER, announced.detail)
                if all(self._log.swap(each, announced, member_now) == member_now for each in self.places):
                    self.is_member, self.is_pending = True, False
            case Admission.REFUSED:
                raise self._refused("it can reach none of its members")
            case Admission.WAIT if not self.waiting.remaining:
                raise RendezvousTimeoutError(
                    f"{Arrival.of(self.me, 0)} waited {self.waiting.timeout:g} s at "
                    f"{self._store.description} to become a member of its dynamic group: "
                    f"{_listed([repr(each.name) for each in others])} did not "
                    f"finish joining, or did not answer{self._reasons()}"
                )

    def _contact(self, index: int, member: Member) -> Contact:
        """Return this newcomer's contact to a worker. One on another host whose address refuses is asked."""
        if self._has_met(member.incarnation):
            return Contact.MET
        if self._neighbours.gone_reason(member.incarnation) is None:
            return Contact.TRYING
        if self._has_ended(member):
            return Contact.DEAD
        if self._tell(member) is not False:
            return Contact.LOST
        match self._parting(index, Part(min(self.places), frozenset({self.me.incarnation}))):
            case Action.WAIT:
                return Contact.TRYING
            case Action.YIELD:
                return Contact.LOST
        return Contact.DEAD

    def _refused(self, why: str) -> NotAdmittedError:
        return NotAdmittedError(
            f"{Arrival.of(self.me, 0)} cannot join the dynamic group at {self._store.description}: "
            f"{why}{self._reasons()}. Check that it has the group's TLS options and token, that no firewall "
            f"is in between in either direction, and that others can reach the address in listen=. "
            f"If those workers hang or are gone for good, end them, or give the new group another name "
            f"(FARCALL_JOB)."
        )

    def _reasons(self) -> str:
        """Return why workers in the log were not reached, for errors."""
        members = [each.arrival.member for each in self._log.entries() if each.arrival is not None]
        reasons = [
            f"worker '{each.name}': {reason}"
            for each in members
            if (reason := self._neighbours.gone_reason(each.incarnation)) is not None
        ]
        return f" ({_listed(reasons, '; ')})" if reasons else ""


def _incarnation(entry: Entry) -> int | None:
    """Return the incarnation of the worker at a place, if it is present."""
    return entry.arrival.member.incarnation if entry.arrival is not None and entry.is_present else None


def _listed(texts: Sequence[str], separator: str = ", ") -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return separator.join(texts[:_SHOWN]) + more

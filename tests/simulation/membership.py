"""Dynamic groups in their store, with chance deciding who reaches whom: one group goes on, never two.

Workers join, lose each other, stop, die and leave, firewalls stand between some of them, and somebody deletes
or overwrites records in the store. All of them use the real log, and look at it as members do
(``rpc.rendezvous.watching``), on simulated time. In the end, when everybody has had the time to look, the
members are one group, and no two have one name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Final

from torch.distributed import HashStore  # type: ignore[attr-defined]

from rpc.errors import RendezvousError
from rpc.group.workers import Member, WorkerInfo
from rpc.rendezvous.address import Probe
from rpc.rendezvous.arrivals import Pace
from rpc.rendezvous.dynamic import DynamicGroup, join_dynamic
from rpc.rendezvous.log import Log
from rpc.rendezvous.parting import is_conflict
from rpc.rendezvous.store import SharedStore, StoreWait
from rpc.rendezvous.watching import LogWatch, PutOut
from tests.simulation.truth import Violation

__all__ = ["Membership"]

_PACE: Final = Pace(unwritten=0.0, undecided=0.0, answer=7.0)
_IMPATIENT: Final = Pace(unwritten=0.0, undecided=0.0, answer=0.0)
"""While a worker joins, no time passes here, so nobody can answer it."""

_LOOK_SECONDS: Final = 2.0
_TURNS: Final = 40
_SETTLING_TURNS: Final = 30


class _Worker:
    """One worker, and whom it knows: ``Neighbours`` of its own watch."""

    def __init__(self, world: Membership, group: DynamicGroup) -> None:
        self.world, self.me = world, group.me
        self.present = {member.incarnation: member for member in group.members}
        self.gone: dict[int, str] = {}
        self.met = {group.me.incarnation}
        self.out = ""
        self.alive, self.stopped = True, False
        self.looked_at = world.now
        self.watch = LogWatch(
            group, self, StoreWait(3600.0), world.tell_at(group.me.host), _PACE, lambda: world.now
        )

    def __repr__(self) -> str:
        return f"{self.me.name}-{self.me.incarnation}"

    @property
    def active(self) -> bool:
        return self.alive and not self.out

    def roster(self) -> Sequence[Member]:
        return list(self.present.values())

    def has_met(self, incarnation: int) -> bool:
        return incarnation in self.met

    def gone_reason(self, incarnation: int) -> str | None:
        return self.gone.get(incarnation)

    def meet(self, members: Sequence[Member]) -> None:
        for member in members:
            self.present[member.incarnation] = member

    def put_out(self, reason: str) -> None:
        self.out = reason

    def knows(self, other: _Worker) -> bool:
        """Whether the two have met, and not lost each other."""
        one, two = self.me.incarnation, other.me.incarnation
        return two in self.met and two in self.present and one in other.met and one in other.present

    def has_name_of(self, member: Member) -> bool:
        """Whether it knows another worker of this name or id."""
        taken = {(each.name, each.id) for each in self.present.values() if each != member}
        return is_conflict(member.name, member.id, taken)

    def lose(self, incarnation: int) -> None:
        self.present.pop(incarnation, None)
        self.gone[incarnation] = "no answer"

    def connect(self) -> None:
        """Meet those that it knows, or lose them; they may refuse a worker that they have lost."""
        for incarnation in [each for each in self.present if each not in self.met]:
            other = self.world.workers[incarnation]
            if other.has_name_of(self.me):
                self.lose(incarnation)  # which refuses it
            elif self.world.passes(self, other) and self.me.incarnation not in other.gone:
                self.met.add(incarnation)
                other.met.add(self.me.incarnation)
                other.present[self.me.incarnation] = self.me
            elif not other.stopped and not self.world.may_come_from(other, self):
                self.lose(incarnation)

    def look(self) -> None:
        was_member, self.looked_at = self.watch.is_member, self.world.now
        try:
            self.watch.look()
            if self.watch.is_member and not was_member:
                self.world.check_new_member(self)
        except (PutOut, RendezvousError) as error:
            self.out = str(error)
            for place in self.watch.places:
                Log(self.world.store).remove(place)


class Membership:
    """One run, decided by its seed; ``run`` raises ``Violation`` if two groups are left."""

    def __init__(self, seed: int) -> None:
        self._chance = Random(seed)
        self._shared = SharedStore(None, HashStore(), "the store", None)
        self.store = self._shared.under("farcall/default")
        self.now = 0.0
        self.workers: dict[int, _Worker] = {}
        self._walls: set[tuple[int, int]] = set()
        self._count = 0
        self._is_spoilt = self._chance.random() < 0.5

    def tell_at(self, host: str) -> Probe:
        """What an attempt to connect from a host says: a firewall may refuse for a worker on another host."""

        def tell(member: Member) -> bool | None:
            if not self.workers[member.incarnation].alive:
                return False
            return self._chance.choice((True, None, False)) if self._walls and member.host != host else True

        return tell

    def passes(self, one: _Worker, other: _Worker) -> bool:
        """Whether one worker can connect to another."""
        wall = (one.me.incarnation, other.me.incarnation) in self._walls
        return one.active and other.active and not other.stopped and not wall

    def may_come_from(self, other: _Worker, here: _Worker) -> bool:
        """Whether the other one may still connect to this one."""
        return self.passes(other, here) and here.me.incarnation not in other.gone

    def run(self) -> None:
        """From the first worker to the end."""
        for _ in range(self._chance.randint(1, 4)):
            self._join(cut_off=False)
        deeds = [self._nothing, self._newcomer, self._wall, self._stop, self._kill]
        for _ in range(_TURNS):
            self._turn(self._chance.choice([*deeds, self._spoil] if self._is_spoilt else deeds))
        self._walls.clear()
        for worker in self.workers.values():
            worker.stopped = False
        for _ in range(_SETTLING_TURNS):
            self._turn(self._nothing)
        self._check()

    # ---- what happens

    def _turn(self, deed: object) -> None:
        assert callable(deed)
        deed()
        running = [worker for worker in self.workers.values() if worker.active and not worker.stopped]
        self._chance.shuffle(running)
        for worker in running:
            if worker.active:
                self._notice(worker)
                worker.connect()
                worker.look()
        self.now += _LOOK_SECONDS

    def _notice(self, worker: _Worker) -> None:
        """Lose those to which there is no way any more, or who have lost this worker."""
        for incarnation in [
            each for each in worker.present if each in worker.met and each != worker.me.incarnation
        ]:
            other = self.workers[incarnation]
            if worker.me.incarnation in other.gone or not (
                self.passes(worker, other) or self.passes(other, worker)
            ):
                worker.lose(incarnation)

    def _nothing(self) -> None: ...

    def _newcomer(self) -> None:
        self._join(cut_off=self._chance.random() < 0.5)

    def _join(self, *, cut_off: bool) -> None:
        self._count += 1
        incarnation = self._count
        name = f"w{self._chance.randint(0, 5)}" if self._chance.random() < 0.3 else f"n{incarnation}"
        host = self._chance.choice(("a", "b", f"host{incarnation}"))
        member = Member(WorkerInfo(name, -1), incarnation, host, ())
        try:
            group = join_dynamic(self._shared, member, 30.0, tell=self.tell_at(host), pace=_IMPATIENT)
        except RendezvousError:
            return
        worker = self.workers[incarnation] = _Worker(self, group)
        for other in self.workers.values():
            if cut_off and other is not worker:
                self._walls.add((incarnation, other.me.incarnation))
                if self._chance.random() < 0.7:
                    self._walls.add((other.me.incarnation, incarnation))

    def _wall(self) -> None:
        if self._chance.random() < 0.5:
            self._walls.clear()
            return
        one, other = (self._chance.choice(list(self.workers)) for _ in range(2))
        if one != other:
            self._walls |= {(one, other), (other, one)}

    def _stop(self) -> None:
        worker = self._chance.choice(list(self.workers.values()))
        worker.stopped = not worker.stopped

    def _kill(self) -> None:
        running = [worker for worker in self.workers.values() if worker.active]
        if len(running) > 2:
            self._chance.choice(running).alive = False

    def _spoil(self) -> None:
        """Somebody deletes or overwrites a record, or all of them."""
        places = [place for worker in self.workers.values() for place in worker.watch.places]
        keys = [
            "arrivals",
            "unsettled",
            *(f"arrival/{place}{what}" for place in places for what in ("", "/verdict")),
        ]
        for key in keys if self._chance.random() < 0.3 else [self._chance.choice(keys)]:
            self.store.store.delete_key(self.store.prefix + key)

    # ---- what must hold

    def check_new_member(self, newcomer: _Worker) -> None:
        """A newcomer that has met nobody founds no group beside members that look at the log."""
        others = [each for each in self._members() if each.looked_at > self.now - 2 * _LOOK_SECONDS]
        if not self._is_spoilt and newcomer.met == {newcomer.me.incarnation} and others != [newcomer]:
            raise Violation(f"{newcomer} has met nobody, and founds a group beside {others}")

    def _members(self) -> Iterator[_Worker]:
        return (worker for worker in self.workers.values() if worker.active and worker.watch.is_member)

    def _check(self) -> None:
        """Two members may have lost each other, but not all that the other one has met."""
        members = list(self._members())
        reached = set(members[:1])
        while more := {each for each in members if each not in reached and any(map(each.knows, reached))}:
            reached |= more
        if len(reached) < len(members):
            raise Violation(
                f"two groups: of the members {members}, {sorted(map(str, reached))} know each other only"
            )
        names = [worker.me.name for worker in members]
        if len(set(names)) < len(names):
            raise Violation(f"two members have one name: {members}")

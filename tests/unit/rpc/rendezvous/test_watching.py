"""One look at the log of a dynamic group after another: workers that cannot reach each other, and damage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rpc.errors import NotAdmittedError
from rpc.group.workers import Member
from rpc.rendezvous.arrivals import Pace
from rpc.rendezvous.dynamic import DynamicGroup, join_dynamic
from rpc.rendezvous.log import Log
from rpc.rendezvous.store import SharedStore, StoreWait
from rpc.rendezvous.watching import LogWatch, PutOut
from tests.unit.rpc.rendezvous.conftest import Acquaintances, Listening, Workers

PACE = Pace(answer=10.0)


class Watcher:
    """A worker of a dynamic group that looks at the log when a test says so, on the test's clock."""

    now = 0.0

    def __init__(self, group: DynamicGroup, tell: Callable[[Member], bool | None]) -> None:
        self.group, self.me, self.incarnation = group, group.me, group.me.incarnation
        self.known = Acquaintances(group)
        clock = lambda: Watcher.now  # noqa: E731
        self.watch = LogWatch(group, self.known, StoreWait(30), tell, PACE, clock)

    def meet(self, *others: Watcher) -> Watcher:
        for other in others:
            self.known.meet([other.me])
            other.known.meet([self.me])
        return self

    def lose(self, *others: Watcher) -> None:
        for other in others:
            self.known.lose(other.incarnation)

    def look(self) -> Watcher:
        self.watch.look()
        return self


@pytest.fixture
def start(memory: SharedStore, workers: Workers) -> Callable[..., list[Watcher]]:
    """Workers that join one after another, on hosts of their own, so that nobody knows who lives."""
    Watcher.now = 0.0

    def begin(
        count: int, first: int = 0, tell: Callable[[Member], bool | None] = lambda _: None
    ) -> list[Watcher]:
        made: list[Watcher] = []
        for number in range(first, first + count):
            worker: Listening = workers(number + 1)[number]
            member = replace(worker.member, host=f"host{number}")
            made.append(Watcher(join_dynamic(memory, member, 5, pace=PACE, tell=tell), tell))
        return made

    return begin


def group_of(start: Callable[..., list[Watcher]], count: int) -> list[Watcher]:
    made = start(count)
    for index, each in enumerate(made):
        each.meet(*made[:index]).look()
    return made


def in_log(store: SharedStore) -> set[str]:
    found = (entry.member() for entry in Log(store.under("farcall/default")).read())
    return {member.name for member in found if member is not None}


def wait(seconds: float = PACE.answer + 1) -> None:
    Watcher.now += seconds


# ---- newcomers


@pytest.mark.parametrize("refuses", [None, False], ids=["no answer", "connection refused"])
def test_a_newcomer_that_reaches_nobody_is_refused_and_takes_nobody_out(
    memory: SharedStore, start: Callable[..., list[Watcher]], refuses: bool | None
) -> None:
    """A firewall may refuse connections as the kernel of a dead process does."""
    members = group_of(start, 2)
    (newcomer,) = start(1, first=2, tell=lambda _: refuses)
    newcomer.lose(*members)
    with pytest.raises(NotAdmittedError, match=r"'worker2' .* cannot join .*'worker0': no answer.*firewall"):  # noqa: PT012
        for _ in range(3):
            newcomer.look()
            for member in members:
                member.look()
            wait()
    assert in_log(memory) == {"worker0", "worker1", "worker2"}
    assert not members[0].known.out


def test_a_newcomer_founds_a_group_when_those_before_it_refuse_and_do_not_answer(
    memory: SharedStore, start: Callable[..., list[Watcher]]
) -> None:
    dead = group_of(start, 2)
    (newcomer,) = start(1, first=2, tell=lambda _: False)
    newcomer.lose(*dead)
    assert not newcomer.look().watch.is_member
    wait()
    assert newcomer.look().look().watch.is_member
    assert in_log(memory) == {"worker2"}


def test_a_newcomer_that_was_stopped_joins_the_members_that_came_after_it(
    start: Callable[..., list[Watcher]],
) -> None:
    (first,) = group_of(start, 1)
    (slow,) = start(1, first=1, tell=lambda _: False)
    (later,) = start(1, first=2)
    later.meet(first).look()
    slow.lose(first)
    assert not slow.look().watch.is_member
    wait()  # nobody before it lives
    assert slow.look().watch.is_member
    assert slow.known.has_met(later.incarnation)


def test_a_newcomer_under_the_name_of_a_dead_worker_stays_where_that_death_is_not_noticed_yet(
    start: Callable[..., list[Watcher]],
) -> None:
    leader, member, dead = group_of(start, 3)
    (newcomer,) = start(1, first=2, tell=lambda _: False)  # which finds it dead
    newcomer.meet(member).look()
    for _ in range(3):
        leader.look()
        newcomer.look()
    assert newcomer.watch.is_member
    leader.lose(dead)
    leader.look()
    leader.look()
    assert leader.known.has_met(newcomer.incarnation)


# ---- parting


def test_a_member_that_is_cut_off_leaves_and_not_the_others(
    memory: SharedStore, start: Callable[..., list[Watcher]]
) -> None:
    one, two, three = group_of(start, 3)
    three.lose(one, two)
    three.look()
    one.look()
    two.look()
    with pytest.raises(PutOut, match="has lost 'worker0', and the group goes on there"):
        three.look()
    assert in_log(memory) == {"worker0", "worker1", "worker2"}


def test_the_oldest_is_asked_to_leave_when_it_is_the_one_cut_off(start: Callable[..., list[Watcher]]) -> None:
    one, two, three = group_of(start, 3)
    two.lose(one)
    three.lose(one)
    two.look()
    with pytest.raises(PutOut, match="larger"):
        one.look()


def test_a_stopped_member_is_taken_out_and_learns_of_it(
    memory: SharedStore, start: Callable[..., list[Watcher]]
) -> None:
    one, two, stopped = group_of(start, 3)
    one.lose(stopped)
    two.lose(stopped)
    for _ in range(2):
        one.look()
        two.look()
        wait()
    assert in_log(memory) == {"worker0", "worker1"}
    with pytest.raises(PutOut, match="removed it"):
        stopped.look()


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_members_that_lose_each_other_the_older_stays(
    start: Callable[..., list[Watcher]], first: int
) -> None:
    older, younger = pair = group_of(start, 2)
    older.lose(younger)
    younger.lose(older)
    pair[first].look()

    def go_on() -> None:
        for _ in range(3):
            younger.look()
            older.look()

    with pytest.raises(PutOut, match=r"it has lost 'worker0'|larger, or as large and older"):
        go_on()
    older.look()


# ---- damage


DAMAGE: dict[str, Callable[[SharedStore], object]] = {
    "all is deleted": lambda store: [
        store.store.delete_key(store.prefix + key)
        for key in (
            "arrivals",
            "unsettled",
            *(f"arrival/{n}{what}" for n in (1, 2) for what in ("", "/verdict")),
        )
    ],
    "the counter is deleted": lambda store: store.store.delete_key(store.prefix + "arrivals"),
    "a verdict is deleted": lambda store: store.store.delete_key(store.prefix + "arrival/1/verdict"),
    "an arrival is deleted": lambda store: store.store.delete_key(store.prefix + "arrival/2"),
    "an arrival is overwritten": lambda store: store.store.set(store.prefix + "arrival/1", "garbage"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_members_write_again_what_was_deleted_or_overwritten(
    memory: SharedStore, start: Callable[..., list[Watcher]], what: str
) -> None:
    members = group_of(start, 2)
    DAMAGE[what](memory.under("farcall/default"))
    for member in members:
        member.look()
    assert in_log(memory) == {"worker0", "worker1"}
    (newcomer,) = start(1, first=2)
    assert [each.name for each in newcomer.group.others] == ["worker0", "worker1"]


def test_one_that_has_founded_a_group_under_a_members_name_meanwhile_leaves(
    memory: SharedStore, start: Callable[..., list[Watcher]]
) -> None:
    members = group_of(start, 2)
    DAMAGE["all is deleted"](memory.under("farcall/default"))
    (founder,) = start(1, first=1)
    with pytest.raises(PutOut):  # noqa: PT012
        for _ in range(4):
            for each in members:
                each.look()
            founder.look()
    for each in members:
        each.look()

from __future__ import annotations

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from rpc.errors import GroupMismatchError, RendezvousTimeoutError
from rpc.group.workers import Member
from rpc.rendezvous.arrivals import Arrival, Kind, Pace, Verdict
from rpc.rendezvous.dynamic import DynamicGroup, join_dynamic
from rpc.rendezvous.init_method import open_store
from rpc.rendezvous.keeping import Keeper, Loss
from rpc.rendezvous.static import join_static
from rpc.rendezvous.store import Log, SharedStore
from tests.unit.rpc.rendezvous.conftest import Connect, StartWorker, Workers, in_thread, results


def _names(members: tuple[Member, ...]) -> set[str]:
    return {member.name for member in members}


def keep(group: DynamicGroup) -> Keeper:
    return Keeper(group, 5, lambda: list(group.members), list, list, bool)


def test_of_workers_that_join_at_once_each_pair_is_known_to_one(connect: Connect, workers: Workers) -> None:
    groups = results([in_thread(join_dynamic, connect(), worker.member, 10) for worker in workers(8)])
    assert len({group.key for group in groups}) == 1
    known = {frozenset((group.me.name, other.name)) for group in groups for other in group.others}
    assert len(known) == 8 * 7 // 2
    assert sum(len(group.others) for group in groups) == 8 * 7 // 2


def test_worker_that_left_is_not_known_to_later_ones(connect: Connect, workers: Workers) -> None:
    one, two, three = workers(3)
    first = join_dynamic(connect(), one.member, 5)
    join_dynamic(connect(), two.member, 5)
    assert keep(first).leave()
    assert _names(join_dynamic(connect(), three.member, 5).others) == {"worker1"}


@pytest.mark.parametrize("parts", [1, 2])
def test_of_parts_that_take_each_other_out_at_once_one_stays(
    memory: SharedStore, workers: Workers, parts: int
) -> None:
    """Each leader, when it is about to take the others out, leaves the others the time to do the same."""
    groups = [join_dynamic(memory, worker.member, 5) for worker in workers(1 + parts)]
    me = [group.me for group in groups]
    out: set[str] = set()
    turns = iter(range(1, parts + 1))

    def tell(_: Member) -> bool:
        for other in turns:
            keepers[other]._look()
        return True

    def leader(me: Member, group: DynamicGroup) -> Keeper:
        return Keeper(group, 5, lambda: [me], list, lambda _: out.add(me.name), bool, tell=tell)

    keepers = [leader(group.me, group) for group in groups]
    for keeper, own in zip(keepers, me, strict=True):
        for lost in me:
            if lost is not own:
                keeper.worker_gone(Loss(lost.incarnation, may_live=True))
                keeper._wait(0)
        keeper._dead = dict.fromkeys(keeper._dead, 1)
    keepers[0]._look()
    for keeper in keepers:
        keeper._check_at = 0
        keeper._look()
    assert len(out) == parts


def test_who_takes_others_out_and_dies_before_leaves_it_to_the_next(
    memory: SharedStore, workers: Workers
) -> None:
    """Of 0, 1 and 2, 1 has lost the others, and they it. 0 may take it out, and dies; 2 had left it to 0."""
    one, other, next_one = groups = [join_dynamic(memory, worker.member, 5) for worker in workers(3)]
    alive = {group.me.incarnation for group in groups}
    parts = [{0, 2}, {1}, {0, 2}]
    out: list[str] = []

    def keeper(group: DynamicGroup) -> Keeper:
        me = group.me
        lost = {each.me.incarnation for each in groups if each.me.id not in parts[me.id]}

        def roster() -> list[Member]:
            here = [each.me for each in groups if each.me.incarnation not in lost]
            return [each for each in here if each.incarnation in alive]

        def given_up(incarnation: int) -> bool:
            return incarnation in lost or incarnation not in alive

        made = Keeper(
            group, 5, roster, list, out.append, given_up, tell=lambda each: each.incarnation in alive
        )
        for incarnation in lost:
            made.worker_gone(Loss(incarnation, may_live=True))
            made._wait(0)
        return made

    def look(*keepers: Keeper) -> None:
        for each in keepers:
            each._check_at = 0
            each._look()

    first, second = keeper(other), keeper(next_one)
    log = Log(memory.under("farcall/default"))
    assert log.may_take_out(one.me.incarnation, other.me.incarnation)
    for _ in range(3):
        look(first, second)  # which wait for it
    assert not out
    alive.remove(one.me.incarnation)
    second.worker_gone(Loss(one.me.incarnation))
    second._wait(0)
    for _ in range(6):
        look(first, second)
    assert len(set(out)) == 1
    assert len([entry for entry in log.read() if entry.member()]) == 1


def test_of_two_that_die_at_once_none_stays(memory: SharedStore, workers: Workers) -> None:
    """One of them was to take out the other."""
    first, dead, me = (join_dynamic(memory, worker.member, 5) for worker in workers(3))
    here, lost = [first.me, me.me], {dead.me.incarnation}
    keeper = Keeper(me, 5, lambda: here, list, list, lost.__contains__, tell=lambda each: each == me.me)
    keeper.worker_gone(Loss(dead.me.incarnation))
    keeper._wait(0)
    keeper._look()
    here.remove(first.me)
    lost.add(first.me.incarnation)
    keeper.worker_gone(Loss(first.me.incarnation))
    keeper._wait(0)
    keeper._look()
    (left,) = Log(memory.under("farcall/default")).read()
    assert left.member() == me.me


def test_ids_are_given_to_those_without_rank(connect: Connect, start_worker: StartWorker) -> None:
    join_dynamic(connect(), start_worker("ranked", 1).member, 5)
    futures = [
        in_thread(join_dynamic, connect(), start_worker(name, -1).member, 10) for name in ("a", "b", "c")
    ]
    assert {group.me.id for group in results(futures)} == {0, 2, 3}


def test_dead_member_is_replaced_by_its_next_incarnation(
    memory: SharedStore, workers: Workers, start_worker: StartWorker
) -> None:
    (before,) = workers(1)
    join_dynamic(memory, before.member, 5)
    before.die()
    after = start_worker("worker0", 0)
    assert join_dynamic(memory, after.member, 5).members == (after.member,)
    assert join_dynamic(memory, start_worker("later", 1).member, 5).others == (after.member,)


def test_static_group_in_the_same_store_is_refused(connect: Connect, start_worker: StartWorker) -> None:
    static = start_worker("static", 0)
    join_static(connect(), static.member, 1, 5)
    text = "RPC group mixes statically and dynamically initialized members which is not supported."
    with pytest.raises(GroupMismatchError, match=text):
        join_dynamic(connect(), start_worker("dynamic", 1).member, 5)
    static.die()
    assert not join_dynamic(connect(), start_worker("dynamic", 1).member, 5).static


def test_worker_that_joins_while_a_static_group_assembles_is_refused(
    memory: SharedStore, start_worker: StartWorker
) -> None:
    _leave_arrival(memory, start_worker("static", 0).member, 2)
    with pytest.raises(GroupMismatchError, match=r"mixes statically and dynamically.*: static\."):
        join_dynamic(memory, start_worker("dynamic", 1).member, 5)


# Joiners that die or stop on the way


def _leave_arrival(store: SharedStore, member: Member, world_size: int = 0) -> int:
    """A worker that has arrived and does nothing more; returns its place."""
    return Log(store.under("farcall/default")).append(Arrival.of(member, world_size))


def test_arrival_never_written_is_passed_over(connect: Connect, workers: Workers) -> None:
    connect().under("farcall/default").add("arrivals", 1)
    (worker,) = workers(1)
    assert join_dynamic(connect(), worker.member, 5, pace=Pace(unwritten=0.05)).members == (worker.member,)


@pytest.mark.parametrize("world_size", [0, 2])
def test_joiner_that_died_undecided_is_passed_over(
    memory: SharedStore, workers: Workers, world_size: int
) -> None:
    dead, alive = workers(2)
    _leave_arrival(memory, dead.member, world_size)
    dead.die()
    assert join_dynamic(memory, alive.member, 5).others == ()


def test_joiner_that_was_taken_for_dead_arrives_again(memory: SharedStore, workers: Workers) -> None:
    one, slow = workers(2)
    log = Log(memory.under("farcall/default"))
    join_dynamic(memory, one.member, 5)

    def tell(_: Member) -> bool:
        log.decide(2, Verdict(Kind.GONE))  # as another joiner does that has waited too long for the slow one
        return False

    again = Member(one.member.info, slow.member.incarnation, "", ())
    group = join_dynamic(memory, again, 5, tell=tell)
    assert group.place == 3
    assert group.members == (again,)


def test_joiner_that_stops_undecided_is_given_up_in_the_end(memory: SharedStore, workers: Workers) -> None:
    stopped, alive = workers(2)
    _leave_arrival(memory, stopped.member)
    with pytest.raises(RendezvousTimeoutError, match=r"'worker1' .* 0\.1 s .* 'worker0' .* not finish"):
        join_dynamic(memory, alive.member, 0.1)
    assert join_dynamic(memory, alive.member, 5, pace=Pace(undecided=0.05)).others == ()


def test_joiner_that_had_joined_when_the_store_was_lost_joins_again(
    memory: SharedStore, workers: Workers
) -> None:
    (worker,) = workers(1)
    join_dynamic(memory, worker.member, 5)
    assert join_dynamic(memory, worker.member, 5).members == (worker.member,)


def test_leaving_a_store_that_is_gone_does_no_harm(workers: Workers) -> None:
    class Closing(HashStore):
        closed = False

        def check(self, keys: list[str]) -> bool:
            if self.closed:
                raise RuntimeError("connection closed")
            return bool(super().check(keys))

    store = Closing()
    group = join_dynamic(open_store(store, 0, None, timeout=5), workers(1)[0].member, 5)
    store.closed = True
    assert not keep(group).leave()

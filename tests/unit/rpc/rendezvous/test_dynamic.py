from __future__ import annotations

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from rpc.errors import GroupMismatchError, NotInitializedError, RendezvousTimeoutError
from rpc.group.workers import Member
from rpc.rendezvous.arrivals import Arrival, ArrivalKind, Pace, Verdict
from rpc.rendezvous.dynamic import DynamicGroup, join_dynamic
from rpc.rendezvous.init_method import open_store
from rpc.rendezvous.keeping import Keeper
from rpc.rendezvous.log import Log
from rpc.rendezvous.static import join_static
from rpc.rendezvous.store import SharedStore
from tests.unit.rpc.rendezvous.conftest import (
    Acquaintances,
    Connect,
    StartWorker,
    Workers,
    in_thread,
    results,
)


def _names(members: tuple[Member, ...]) -> set[str]:
    return {member.name for member in members}


def keep(group: DynamicGroup) -> Keeper:
    return Keeper(group, 5, Acquaintances(group))


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


def test_what_a_worker_that_has_left_asks_of_the_store_fails(connect: Connect, workers: Workers) -> None:
    [one] = workers(1)
    keeper = keep(join_dynamic(connect(), one.member, 5))
    assert keeper.leave(60)
    with pytest.raises(NotInitializedError, match="'worker0' has left its dynamic group"):
        keeper.ask(lambda store: store.description).result(timeout=60)


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
        log.decide(
            2, Verdict(ArrivalKind.GONE)
        )  # as another joiner does that has waited too long for the slow one
        return False

    again = Member(one.member.info, slow.member.incarnation, one.member.host, ())
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

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            if self.closed:
                raise RuntimeError("connection closed")
            return bytes(super().compare_set(key, expected, desired))

    store = Closing()
    group = join_dynamic(open_store(store, 0, None, timeout=5), workers(1)[0].member, 5)
    store.closed = True
    assert not keep(group).leave()

from __future__ import annotations

from collections.abc import Callable

import pytest

from rpc.errors import GroupMismatchError, RendezvousTimeoutError
from rpc.group.workers import Member
from rpc.rendezvous import SharedStore, dynamic, join_dynamic, join_static
from rpc.rendezvous.roster import GONE, Roster
from tests.unit.rpc.rendezvous.conftest import Listening, StartWorker, in_thread, results

Connect = Callable[[], SharedStore]
Workers = Callable[[int], list[Listening]]


def _names(members: tuple[Member, ...]) -> set[str]:
    return {member.name for member in members}


def test_first_worker_founds_the_group(connect: Connect, workers: Workers) -> None:
    (worker,) = workers(1)
    group = join_dynamic(connect(), worker.member, 5)
    assert group.members == (worker.member,)
    assert group.others == ()
    assert not group.static


def test_each_knows_those_that_joined_before(connect: Connect, workers: Workers) -> None:
    for number, worker in enumerate(workers(4)):
        group = join_dynamic(connect(), worker.member, 5)
        assert _names(group.others) == {f"worker{earlier}" for earlier in range(number)}


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
    assert first.leave()
    assert _names(join_dynamic(connect(), three.member, 5).others) == {"worker1"}


def test_workers_come_and_go_many_times(memory: SharedStore, start_worker: StartWorker) -> None:
    stays = start_worker("stays", 0)
    join_dynamic(memory, stays.member, 5)
    for round_number in range(30):
        comes = start_worker("comes", 1)
        group = join_dynamic(memory, comes.member, 5)
        assert _names(group.members) == {"stays", "comes"}, round_number
        group.leave()
        comes.die()


def test_long_history_of_the_gone_is_not_read_again(memory: SharedStore, start_worker: StartWorker) -> None:
    for _ in range(5):
        comes = start_worker("comes", 1)
        join_dynamic(memory, comes.member, 5).leave()
    join_dynamic(memory, start_worker("next", 1).member, 5)
    assert memory.under("farcall/default").counter("roster/first") == 6


def test_ids_are_given_to_those_without_rank(connect: Connect, start_worker: StartWorker) -> None:
    join_dynamic(connect(), start_worker("ranked", 1).member, 5)
    futures = [
        in_thread(join_dynamic, connect(), start_worker(name, -1).member, 10) for name in ("a", "b", "c")
    ]
    assert {group.me.id for group in results(futures)} == {0, 2, 3}


@pytest.mark.parametrize(("name", "rank", "what"), [("worker0", 5, "name 'worker0'"), ("other", 0, "rank 0")])
def test_place_of_a_living_member_is_refused(
    memory: SharedStore, workers: Workers, start_worker: StartWorker, name: str, rank: int, what: str
) -> None:
    join_dynamic(memory, workers(1)[0].member, 5)
    refused = start_worker(name, rank)
    with pytest.raises(GroupMismatchError, match=f"{what} is not unique.*'worker0'.*process"):
        join_dynamic(memory, refused.member, 5)
    later = join_dynamic(memory, start_worker("later", 9).member, 5)
    assert _names(later.others) == {"worker0"}


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


# Joiners that die or stop on the way


def test_entry_never_written_is_passed_over(
    connect: Connect, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic, "_UNWRITTEN_SECONDS", 0.05)
    connect().under("farcall/default").add("roster", 1)
    (worker,) = workers(1)
    assert join_dynamic(connect(), worker.member, 5).members == (worker.member,)


def test_joiner_that_died_undecided_is_passed_over(memory: SharedStore, workers: Workers) -> None:
    dead, alive = workers(2)
    Roster(memory.under("farcall/default")).append(dead.member, "process 1 on nowhere")
    dead.die()
    assert join_dynamic(memory, alive.member, 5).others == ()


def test_joiner_that_was_taken_for_dead_appends_itself_again(memory: SharedStore, workers: Workers) -> None:
    slow, other = workers(2)
    roster = Roster(memory.under("farcall/default"))
    asked = []

    def tell(member: Member) -> bool:
        asked.append(member)
        if len(asked) == 1:
            roster.decide(2, GONE)  # as another joiner does that has waited too long for the slow one
        return False

    join_dynamic(memory, other.member, 5)
    group = join_dynamic(memory, Member(other.member.info, 5, "", ()), 5, tell=tell)
    assert group.place == 3
    assert group.members[0].incarnation == 5
    assert slow.member not in group.members


def test_joiner_that_stops_undecided_is_given_up_in_the_end(
    memory: SharedStore, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, alive = workers(2)
    Roster(memory.under("farcall/default")).append(stopped.member, "process 1 on nowhere")
    with pytest.raises(RendezvousTimeoutError, match=r"'worker1' .* waited 0\.1 s"):
        join_dynamic(memory, alive.member, 0.1)
    monkeypatch.setattr(dynamic, "_UNDECIDED_SECONDS", 0.05)
    assert join_dynamic(memory, alive.member, 5).others == ()


def test_leaving_a_store_that_is_gone_does_no_harm(memory: SharedStore, workers: Workers) -> None:
    group = join_dynamic(memory, workers(1)[0].member, 5)

    class Gone:
        def __getattr__(self, name: str) -> None:
            raise RuntimeError("connection closed")

    group.store.store = Gone()  # type: ignore[assignment]
    assert not group.leave()


def test_store_that_fails_whenever_it_is_opened_is_named_with_its_error(
    full: SharedStore, workers: Workers
) -> None:
    with pytest.raises(RendezvousTimeoutError, match=r"the full store .* 0\.1 s .* No space left on device"):
        join_dynamic(full, workers(1)[0].member, 0.1)

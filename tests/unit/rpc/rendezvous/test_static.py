from __future__ import annotations

from dataclasses import replace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from rpc.errors import GroupMismatchError, RendezvousTimeoutError
from rpc.group.workers import Member
from rpc.rendezvous.arrivals import Arrival, ArrivalKind, Group, Pace, Verdict
from rpc.rendezvous.dynamic import join_dynamic
from rpc.rendezvous.init_method import open_store
from rpc.rendezvous.log import Log
from rpc.rendezvous.static import join_static
from rpc.rendezvous.store import SharedStore
from rpc.runtime import notices
from tests.unit.rpc.rendezvous.conftest import Connect, StartWorker, Workers, errors, in_thread, results

QUICK = Pace(settle=0.05, gather=0.2, latecomer=0.1, farewell=1.0)


def join(store: SharedStore, member: Member, world_size: int, timeout: float = 10, **kwargs: object) -> Group:
    return join_static(store, member, world_size, timeout, pace=QUICK, **kwargs)  # type: ignore[arg-type]


def test_all_workers_get_the_same_group(connect: Connect, workers: Workers) -> None:
    everybody = [worker.member for worker in workers(8)]
    groups = results([in_thread(join, connect(), member, 8) for member in reversed(everybody)])
    assert [group.me for group in reversed(groups)] == everybody
    assert all(group.members == tuple(everybody) for group in groups)
    assert len({group.key for group in groups}) == 1
    assert all(group.static for group in groups)


def test_fast_worker_may_arrive_for_the_next_group_while_others_leave_the_last(
    memory: SharedStore, workers: Workers, start_worker: StartWorker
) -> None:
    first = workers(2)
    results([in_thread(join, memory, worker.member, 2) for worker in first])
    first[1].die()
    again = start_worker("worker1", 1)
    early = in_thread(join, memory, again.member, 2)
    first[0].die()
    zero = start_worker("worker0", 0)
    late = in_thread(join, memory, zero.member, 2)
    assert [group.members for group in results([early, late])] == [(zero.member, again.member)] * 2


def test_jobs_share_a_store(memory: SharedStore, workers: Workers) -> None:
    blue, red = workers(2), workers(2)
    futures = [in_thread(join, memory, worker.member, 2, job="blue") for worker in blue]
    futures += [in_thread(join, memory, worker.member, 2, job="red") for worker in red]
    groups = results(futures)
    assert groups[0].members == tuple(worker.member for worker in blue)
    assert groups[2].members == tuple(worker.member for worker in red)


# What cannot be a group


@pytest.mark.parametrize("rank", [1, 0])
def test_worker_whose_place_is_taken_is_refused_when_it_comes_late(
    memory: SharedStore, workers: Workers, start_worker: StartWorker, rank: int
) -> None:
    results([in_thread(join, memory, worker.member, 2) for worker in workers(2)])
    with pytest.raises(GroupMismatchError, match=f"rank {rank} is not unique.*'worker{rank}'.*running"):
        join(memory, start_worker("late", rank).member, 2)


def test_a_second_group_is_refused_while_the_first_is_running(
    memory: SharedStore, workers: Workers, start_worker: StartWorker
) -> None:
    """Another job's, most likely: its workers would get mixed up with this one's."""
    results([in_thread(join, memory, worker.member, 2) for worker in workers(2)])
    others = [start_worker(f"other{rank}", rank) for rank in range(2)]
    for error in errors([in_thread(join, memory, other.member, 2) for other in others]):
        assert isinstance(error, GroupMismatchError)
        assert "rank 0 is not unique. Worker 'worker0'" in str(error)
        assert "choose another port or file" in str(error)


def test_a_group_forms_anew_at_the_addresses_of_the_last(memory: SharedStore, workers: Workers) -> None:
    """Where workers listen on fixed ports, whoever is there now is not who was there before."""
    first = [worker.member for worker in workers(2)]
    results([in_thread(join, memory, member, 2) for member in first])
    again = [replace(member, incarnation=member.incarnation + 1000) for member in first]
    groups = results([in_thread(join, memory, member, 2) for member in again])
    assert [group.members for group in groups] == [tuple(again)] * 2


def test_dynamic_group_in_the_same_store_is_refused(memory: SharedStore, start_worker: StartWorker) -> None:
    dynamic = start_worker("dynamic", 7)
    join_dynamic(memory, dynamic.member, 5)
    with pytest.raises(GroupMismatchError, match="mixes statically and dynamically initialized members"):
        join(memory, start_worker("static", 0).member, 1)
    dynamic.die()
    assert join(memory, start_worker("static", 0).member, 1).static


# What died on the way


def _leave_arrival(store: SharedStore, member: Member, world_size: int) -> int:
    """A worker that has arrived and does nothing more; returns its place."""
    return Log(store.under("farcall/default")).append(Arrival.of(member, world_size))


def test_dead_claimants_of_every_rank_are_replaced(memory: SharedStore, workers: Workers) -> None:
    for worker in workers(3):
        _leave_arrival(memory, worker.member, 4)  # of another size, to make it worse
        worker.die()
    everybody = workers(3)
    groups = results([in_thread(join, memory, worker.member, 3) for worker in everybody])
    assert groups[0].members == tuple(worker.member for worker in everybody)


def test_group_is_not_completed_by_the_dead(memory: SharedStore, workers: Workers) -> None:
    zero, one = workers(2)
    _leave_arrival(memory, one.member, 2)
    one.die()
    with pytest.raises(RendezvousTimeoutError, match="missing: 1"):
        join(memory, zero.member, 2, timeout=1)


def test_second_claimant_of_rank_0_coordinates_once_the_first_is_dead(
    memory: SharedStore, workers: Workers, start_worker: StartWorker
) -> None:
    first, one = workers(2)
    _leave_arrival(memory, first.member, 2)
    zero = start_worker("worker0", 0)
    futures = [in_thread(join, memory, worker.member, 2) for worker in (zero, one)]
    assert not futures[0].done()
    first.die()
    assert [group.members for group in results(futures)] == [(zero.member, one.member)] * 2


def test_rank_0_that_another_has_refused_decides_on_nobody_else(
    memory: SharedStore, workers: Workers
) -> None:
    """Two workers claim rank 0: the others may arrive again before the second one has read its verdict."""
    zero, one, other = (worker.member for worker in workers(3))
    refused = Verdict(ArrivalKind.MISMATCH, "the rank 0 is not unique")
    log = Log(memory.under("farcall/default"))
    again: list[int] = []

    def refuse(_: Member) -> bool:
        if not again:
            log.decide(2, refused)
            again.append(_leave_arrival(memory, other, 2))
        return False

    assert _leave_arrival(memory, one, 2) == 1
    with pytest.raises(GroupMismatchError, match="the rank 0 is not unique"):
        join(memory, zero, 2, tell=refuse)
    assert log.verdict(again[0]) is None


def test_place_taken_but_never_written_is_passed_over(connect: Connect, workers: Workers) -> None:
    connect().under("farcall/default").add("arrivals", 1)
    pair = workers(2)
    groups = results([in_thread(join, connect(), worker.member, 2) for worker in pair])
    assert groups[0].members == tuple(worker.member for worker in pair)


def test_worker_that_was_given_up_before_it_wrote_its_arrival_arrives_again(
    memory: SharedStore, workers: Workers
) -> None:
    zero, one = workers(2)

    class GivenUp(HashStore):
        """A store in which somebody finds the first place taken and not written, and gives it up."""

        def add(self, key: str, amount: int) -> int:
            index = int(super().add(key, amount))
            if key.endswith("/arrivals") and index == 1:
                Log(store).decide(index, Verdict(ArrivalKind.GONE))
            return index

    shared = open_store(GivenUp(), 0, None, timeout=10)
    store = shared.under("farcall/default")
    futures = [in_thread(join, shared, worker.member, 2) for worker in (one, zero)]
    assert [group.members for group in results(futures)] == [(zero.member, one.member)] * 2


# Time, and the store


def test_workers_say_that_rank_0_is_missing(memory: SharedStore, workers: Workers) -> None:
    with pytest.raises(RendezvousTimeoutError, match="arrived: 2; missing: 0, 1"):
        join(memory, workers(3)[2].member, 3, timeout=1)


def test_rank_0_stays_until_all_have_read_their_verdict(memory: SharedStore, workers: Workers) -> None:
    zero, one = workers(2)
    place = _leave_arrival(memory, one.member, 2)  # lives, but does not read for now
    coordinator = in_thread(join_static, memory, zero.member, 2, 10)
    reader = memory.under("farcall/default")
    while Log(reader).verdict(place) is None:
        pass
    assert not coordinator.done()
    reader.set(f"arrival/{place}/read", b"1")
    assert coordinator.result(10).members == (zero.member, one.member)


def test_rank_0_does_not_wait_for_a_reader_that_died(memory: SharedStore, workers: Workers) -> None:
    zero, one = workers(2)
    _leave_arrival(memory, one.member, 2)
    answers = iter([True])  # before the verdict; afterwards it is dead

    group = join_static(
        memory, zero.member, 2, 30, tell=lambda _: next(answers, False), pace=Pace(farewell=20)
    )
    assert group.members == (zero.member, one.member)


def test_store_that_fails_whenever_it_is_opened_is_named_with_its_error(
    full: SharedStore, workers: Workers
) -> None:
    with pytest.raises(RendezvousTimeoutError, match=r"the full store .* 0\.1 s .* No space left on device"):
        join(full, workers(1)[0].member, 1, timeout=0.1)


def test_workers_of_pytorchs_rpc_are_named(
    memory: SharedStore, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "FIRST_SECONDS", 0.01)
    (zero,) = workers(1)
    memory.set("rpc_prefix_0/0/1", b"as torch.distributed.rpc leaves it")
    with pytest.raises(GroupMismatchError, match=r"rank 1 .*torch\.distributed\.rpc runs there"):
        join_static(memory, zero.member, 2, 20)

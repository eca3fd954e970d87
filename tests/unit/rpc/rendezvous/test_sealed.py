"""A store is anybody's: what is sealed with another token, or changed, makes no group, and says why."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from rpc.errors import GroupMismatchError, RendezvousError
from rpc.rendezvous.arrivals import Arrival, ArrivalKind, Pace, Verdict
from rpc.rendezvous.dynamic import join_dynamic
from rpc.rendezvous.init_method import open_store
from rpc.rendezvous.log import Log
from rpc.rendezvous.static import join_static
from rpc.rendezvous.store import SharedStore
from rpc.transport.authentication import ForeignRecordError
from tests.unit.rpc.rendezvous.conftest import StartWorker, Workers, errors, in_thread, results

QUICK = Pace(settle=0.05, gather=0.1, latecomer=0.1, farewell=1.0)
TOKEN, GUESS = b"the token", b"a guess"


@pytest.fixture
def shared() -> HashStore:
    return HashStore()


def sealed(shared: HashStore, token: bytes | None) -> SharedStore:
    return open_store(shared, 0, None, timeout=10).sealed(token)


def log(shared: HashStore, token: bytes | None = TOKEN) -> Log:
    return Log(sealed(shared, token).under("farcall/default"))


def put(shared: HashStore, key: str, value: bytes) -> None:
    """As any process that reaches the store can."""
    shared.set(f"farcall/default/{key}", value)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [GUESS, None], ids=["another token", "none"])
def test_workers_with_different_tokens_make_no_group_and_all_learn_why(
    shared: HashStore, workers: Workers, token: bytes | None
) -> None:
    zero, one, two = workers(3)
    joining = [
        in_thread(join_static, sealed(shared, TOKEN), zero.member, 3, 10, pace=QUICK),
        in_thread(join_static, sealed(shared, TOKEN), one.member, 3, 10, pace=QUICK),
        in_thread(join_static, sealed(shared, token), two.member, 3, 10, pace=QUICK),
    ]
    friend, other_friend, stranger = errors(joining)
    for error in (friend, other_friend):
        assert isinstance(error, GroupMismatchError)
        assert str(error).startswith("'worker2' (rank 2, ")
        assert "has another token" in str(error)
    assert isinstance(stranger, GroupMismatchError)
    assert "another worker in this group's store has another token" in str(stranger)
    assert all("FARCALL_TOKEN" in str(error) for error in (friend, stranger))


def test_what_the_dead_have_left_with_another_token_is_passed_over(
    shared: HashStore, workers: Workers
) -> None:
    for dead in workers(2):
        log(shared, GUESS).append(Arrival.of(dead.member, 2))
        dead.die()
    everybody = [worker.member for worker in workers(2)]
    joining = [in_thread(join_static, sealed(shared, TOKEN), each, 2, 10) for each in everybody]
    assert all(group.members == tuple(everybody) for group in results(joining))


def test_a_group_with_another_token_may_have_been_here_before(shared: HashStore, workers: Workers) -> None:
    for token in (GUESS, TOKEN):
        (worker,) = workers(1)
        assert join_static(sealed(shared, token), worker.member, 1, 10).members == (worker.member,)


def test_a_worker_with_another_token_does_not_join_a_dynamic_group_nor_found_a_second(
    shared: HashStore, workers: Workers, start_worker: StartWorker
) -> None:
    one, two = workers(2)
    join_dynamic(sealed(shared, TOKEN), one.member, 10)
    with pytest.raises(GroupMismatchError, match=r"'worker0' .*has another token.*FARCALL_TOKEN"):
        join_dynamic(sealed(shared, GUESS), two.member, 10)
    three = start_worker("worker2", 2)
    assert join_dynamic(sealed(shared, TOKEN), three.member, 10).others == (one.member,)


def test_a_member_that_was_changed_is_not_taken(shared: HashStore, workers: Workers) -> None:
    """A process that writes to the store tries to redirect calls to another worker."""
    zero, one = workers(2)
    store = sealed(shared, TOKEN).under("farcall/default")
    join_static(sealed(shared, TOKEN), zero.member, 1, 10)
    key = store.get("last")
    assert key is not None
    forged = Log(sealed(shared, None).under("farcall/default"))
    their_key = forged.form(one.member.incarnation, (one.member,))
    put(shared, f"group/{key.decode()}", shared.get(f"farcall/default/group/{their_key}"))
    with pytest.raises(ForeignRecordError):
        log(shared).members(key.decode())
    assert log(shared).last_group() == ()


def test_a_record_is_not_taken_from_another_place(shared: HashStore, workers: Workers) -> None:
    (worker,) = workers(1)
    place = log(shared).append(Arrival.of(worker.member, 1))
    put(shared, "arrival/2", shared.get(f"farcall/default/arrival/{place}"))
    entry = log(shared).entry(2)
    assert entry.arrival is None
    assert entry.foreign is not None


def test_a_verdict_by_a_stranger_is_none_but_that_one_is_gone(shared: HashStore, workers: Workers) -> None:
    (worker,) = workers(1)
    place = log(shared).append(Arrival.of(worker.member, 1))
    assert (
        log(shared, GUESS).decide(place, Verdict(ArrivalKind.COMPLETE, "1-666")).kind is ArrivalKind.COMPLETE
    )
    given = log(shared).verdict(place)
    assert given is not None
    with pytest.raises(GroupMismatchError, match="has another token"):
        given.raise_if_refused()
    second = log(shared).append(Arrival.of(worker.member, 1))
    log(shared, GUESS).decide(second, Verdict(ArrivalKind.GONE))
    assert log(shared).verdict(second) == Verdict(ArrivalKind.GONE)


def test_garbage_in_the_place_of_an_arrival_keeps_nobody_out(shared: HashStore, workers: Workers) -> None:
    shared.add("farcall/default/arrivals", 1)
    put(shared, "arrival/1", b"sealed:garbage")
    (worker,) = workers(1)
    assert join_static(sealed(shared, TOKEN), worker.member, 1, 10).members == (worker.member,)


@pytest.mark.parametrize("counter", [b"1000000000", b"garbage"])
def test_a_counter_that_a_stranger_has_set_ends_in_an_error(
    shared: HashStore, workers: Workers, counter: bytes
) -> None:
    put(shared, "arrivals", counter)
    with pytest.raises(RendezvousError, match="a process that does not belong to this job"):
        log(shared).read()
    if counter.isdigit():  # else the store itself counts no further
        for join in (partial(join_static, world_size=1), join_dynamic):
            with pytest.raises(RendezvousError, match="a process that does not belong to this job"):
                join(sealed(shared, TOKEN), workers(1)[0].member, timeout=10)


def test_nobody_is_made_to_connect_to_where_a_stranger_says(workers: Workers) -> None:
    (worker,) = workers(1)
    arrival = Arrival.of(replace(worker.member, addresses=("tcp:10.0.0.1:22", "unix:@x")), 1)
    claimed = Arrival.claimed(1, arrival.pack())
    assert claimed is not None
    assert claimed.member.addresses == ("unix:@x",)


def test_workers_that_cannot_reach_each_other_make_no_group(shared: HashStore, workers: Workers) -> None:
    zero, one = workers(2)
    elsewhere = replace(one.member, host="elsewhere")
    joining = [
        in_thread(join_static, sealed(shared, TOKEN), each, 2, 10, pace=QUICK)
        for each in (zero.member, elsewhere)
    ]
    for error in errors(joining):
        assert isinstance(error, RendezvousError)
        assert "on another host" in str(error)
        assert "listen=" in str(error)

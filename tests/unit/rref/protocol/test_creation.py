"""The reference protocol, sentence by sentence: creations late, early and given up. Worker 1 is the owner."""

import pytest

from rref.protocol.machine import Protocol
from rref.protocol.messages import Confirmed, Failed, Free, Send, State
from tests.unit.rref.protocol.group import Group


def test_created_used_and_dropped_takes_one_message() -> None:
    group = Group(2)
    ref = group.create(2, 1)
    rref = group.workers[2].refs[ref]
    assert group.state(2, ref) is State.PENDING
    group.arrive(0)
    group.finish(1, rref)
    group.arrive(0)
    assert group.state(2, ref) is State.CONFIRMED
    assert group.said == []
    group.release(2, ref)
    assert group.said == [(2, 1, "delete")]
    group.deliver()
    assert group.is_freed(rref)
    group.assert_nothing_left()


# A confirmation before its creation, a delete before both


def test_a_reference_that_comes_to_its_owner_before_its_creation_waits_for_it() -> None:
    owner = Protocol(1)
    ref = owner.adopt([1, [2, 1], [3, 7]], sender=3)
    fetch = owner.expect((2, 1))
    assert owner.state(ref) is State.PENDING
    assert owner.state(fetch) is State.PENDING
    assert owner.take_actions() == [Send(2, ["wanted", (2, 1)])]
    assert owner.arrived((2, 1), (2, 2), creator=2)
    assert owner.take_actions() == [Confirmed(ref), Confirmed(fetch), Send(3, ["accepted", (3, 7)])]


def test_what_two_sweeps_find_parked_is_given_up() -> None:
    owner = Protocol(1)
    owner.receive(3, ["confirm", [2, 1], [2, 7]])
    ref = owner.expect((2, 1))
    assert owner.waits_for_sweep
    owner.sweep()
    assert owner.take_actions() == [Send(2, ["wanted", (2, 1)])]
    owner.sweep()
    reason = "its creation did not arrive in time"
    assert owner.take_actions() == [Send(3, ["refused", (2, 7), reason]), Failed(ref, reason)]
    assert owner.state(ref) is State.FAILED
    assert owner.reason(ref) == reason
    owner.release(ref)
    assert not any(owner.counts().values())


def test_a_creator_that_knows_nothing_of_an_object_says_so_and_references_to_it_fail_at_once() -> None:
    owner, creator = Protocol(1), Protocol(2)
    owner.receive(3, ["confirm", [2, 1], [3, 7]])
    ref = owner.expect((2, 1))
    (asked,) = owner.take_actions()
    assert asked == Send(2, ["wanted", (2, 1)])
    creator.receive(1, ["wanted", [2, 1]])
    assert creator.take_actions() == [Send(1, ["unknown", (2, 1)])]
    owner.receive(2, ["unknown", [2, 1]])
    reason = "its creator knows nothing of it"
    assert owner.take_actions() == [Send(3, ["refused", (3, 7), reason]), Failed(ref, reason)]
    owner.release(ref)
    assert not any(owner.counts().values())


def test_a_denial_that_comes_after_the_creation_changes_nothing() -> None:
    owner = Protocol(1)
    owner.receive(3, ["confirm", [2, 1], [3, 7]])
    assert owner.arrived((2, 1), (2, 2), creator=2)
    owner.finished((2, 1))
    owner.receive(2, ["delete", [2, 1], [2, 2]])
    owner.receive(2, ["unknown", [2, 1]])
    assert Free((2, 1)) not in owner.take_actions()


def test_only_the_creator_can_deny_an_object() -> None:
    owner = Protocol(1)
    ref = owner.expect((2, 1))
    owner.receive(3, ["unknown", [2, 1]])
    assert owner.state(ref) is State.PENDING


def test_what_a_worker_is_said_to_have_created_that_does_not_exist_fails_at_once() -> None:
    owner = Protocol(1)
    ref = owner.expect((9, 1))
    owner.nobody(9)
    assert owner.state(ref) is State.FAILED
    assert "there is no such worker" in owner.reason(ref)


# remote() that times out or fails


def test_a_creation_that_comes_after_its_failed_reference_was_dropped_is_not_run() -> None:
    group = Group(2)
    ref = group.create(2, 1)
    rref = group.workers[2].refs[ref]
    group.give_up(2, ref)
    group.release(2, ref)
    group.deliver("abandon")
    group.arrive(0)
    assert rref not in group.workers[1].running
    assert group.remembered(1) == {"tombstones": 1}
    group.drain()


def test_a_child_confirmed_after_the_creation_was_given_up_is_refused_even_while_it_runs() -> None:
    group = Group(3)
    ref = group.create(2, 1)
    group.call(2, 3, [ref])
    group.arrive(0)
    group.give_up(2, ref)
    group.release(2, ref)
    group.deliver("abandon")
    for _ in range(3):
        group.sweep(1)
    group.arrive(0)
    (child,) = group.workers[3].refs
    group.deliver_everything()
    assert group.state(3, child) is State.FAILED
    group.drain()


def test_a_refusal_that_overtakes_the_message_with_the_fork_voids_it() -> None:
    group = Group(3)
    ref = group.create(2, 1)
    group.arrive(0)
    at_owner = group.pass_on(2, 1, ref)
    group.call(1, 3, [at_owner])
    group.give_up(2, ref)
    group.release(2, ref)
    group.deliver_everything()
    group.arrive(0)
    (child,) = group.workers[3].refs
    assert group.state(3, child) is State.FAILED
    assert group.protocol(3).reason(child) == "it timed out"


def test_a_failed_reference_cannot_be_sent() -> None:
    group = Group(2)
    ref = group.create(2, 1)
    group.give_up(2, ref)
    with pytest.raises(RuntimeError, match="cannot be sent: it timed out"):
        group.protocol(2).fork(ref, 1)
    group.release(2, ref)
    owner = group.protocol(1)
    group.deliver()
    with pytest.raises(RuntimeError, match="cannot be sent: it timed out"):
        owner.fork(owner.expect((2, 1)), 2)


# Creations by the owner itself


def test_a_creation_that_could_not_be_sent_to_oneself_leaves_nothing() -> None:
    protocol = Protocol(1)
    rref, ref = protocol.create(1)
    protocol.release(ref)
    protocol.creation_failed(1, rref, ref, "it could not be sent")
    assert protocol.take_actions() == [Free(rref)]
    assert not protocol.arrived(rref, ref, creator=1)
    protocol.sweep()
    protocol.sweep()
    assert not any(protocol.counts().values())


@pytest.mark.parametrize("arrived", [False, True])
def test_a_creation_sent_to_oneself_can_be_given_up(arrived: bool) -> None:
    group = Group(1)
    ref = group.create(1, 1)
    rref = group.workers[1].refs[ref]
    if arrived:
        group.arrive(0)
    group.give_up(1, ref)
    assert group.state(1, ref) is State.FAILED
    assert group.is_freed(rref) is not arrived
    if arrived:
        group.finish(1, rref)
        assert group.is_freed(rref)
    else:
        group.arrive(0)
        assert rref not in group.workers[1].running
    group.drain()

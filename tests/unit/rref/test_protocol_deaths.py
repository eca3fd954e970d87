"""The reference protocol, sentence by sentence: who dies, and what becomes of it. Worker 1 is the owner."""

import pytest

from rref.protocol.machine import Protocol
from rref.protocol.messages import Fence, Send, State
from rref.protocol.peers import DEAD_MOST, Peers
from tests.unit.rref.group import Group


def test_object_is_freed_when_its_last_user_dies() -> None:
    group = Group(3)
    rref, _ = group.own_and_pass_on(2)
    group.die(2)
    group.notice(1, 2)
    assert group.said == [(1, 3, "fence")]
    assert not group.is_freed(rref)
    group.deliver()
    assert group.said == []
    group.notice(3, 2)
    assert group.said == [(3, 1, "fenced")]
    group.deliver()
    assert group.is_freed(rref)
    group.assert_nothing_left()


def test_object_is_freed_at_once_when_nobody_else_lives() -> None:
    group = Group(2)
    rref, _ = group.own_and_pass_on(2)
    group.die(2)
    group.notice(1, 2)
    assert group.is_freed(rref)
    group.assert_nothing_left()


def test_shell_is_told_once_to_cut_off_whom_others_found_dead() -> None:
    worker = Protocol(3)
    worker.receive(1, ["fence", 2, "its connection closed"])
    worker.receive(4, ["fence", 2, "it is silent"])
    worker.receive(4, ["bereaved", 2])
    assert worker.take_actions() == [Fence(2, "its connection closed")]
    worker.peer_lost(2, "cut off")
    actions = worker.take_actions()
    assert Send(1, ["fenced", 2]) in actions
    assert Send(4, ["fenced", 2]) in actions
    worker.receive(1, ["fence", 2, "again"])
    assert worker.take_actions() == [Send(1, ["fenced", 2])]


def test_user_dies_between_forking_and_the_confirmation_of_its_child() -> None:
    group = Group(3)
    rref, at_two = group.own_and_pass_on(2)
    child = group.pass_on(2, 3, at_two)
    group.die(2)
    group.notice(1, 2)
    group.notice(3, 2)
    group.deliver("fence", to=3)
    assert not group.is_freed(rref)
    assert group.said == [(3, 1, "confirm")]
    group.deliver()
    group.deliver("confirmed")
    assert group.said == [(3, 1, "fenced")]
    group.deliver()
    assert group.state(3, child) is State.CONFIRMED
    assert group.protocol(1).leaks() == {rref: (1, 0)}
    group.release(3, child)
    group.deliver()
    assert group.is_freed(rref)
    group.assert_nothing_left()


@pytest.mark.parametrize(("first", "last"), [(1, 2), (2, 1)])
def test_every_fork_that_came_from_the_dead_is_waited_for(first: int, last: int) -> None:
    worker = Protocol(3)
    for number in (1, 2):
        worker.adopt([1, [1, 1], [2, number]], sender=2)
    worker.peer_lost(2, "gone")
    worker.take_actions()
    worker.receive(1, ["fence", 2, "gone"])
    worker.receive(1, ["confirmed", [2, first]])
    assert Send(1, ["fenced", 2]) not in worker.take_actions()
    worker.receive(1, ["refused", [2, last], "why"])
    assert Send(1, ["fenced", 2]) in worker.take_actions()


def test_a_message_of_the_dead_that_is_still_read_keeps_the_object() -> None:
    group = Group(3)
    rref, at_two = group.own_and_pass_on(2)
    group.call(2, 3, [at_two])
    group.die(2)
    group.notice(1, 2)
    group.deliver("fence")
    group.arrive(0)
    (child,) = group.workers[3].refs
    group.deliver_everything()
    assert not group.is_freed(rref)
    group.notice(3, 2)
    group.deliver_everything()
    assert group.state(3, child) is State.CONFIRMED
    assert group.protocol(1).leaks() == {rref: (1, 0)}


def test_parent_lets_a_dead_child_go_but_not_what_that_had_passed_on() -> None:
    group = Group(4)
    rref, parent = group.own_and_pass_on(2)
    child = group.pass_on(2, 3, parent)
    grandchild = group.pass_on(3, 4, child)
    group.release(2, parent)
    group.die(3)
    group.notice(2, 3)
    assert (2, 1, "bereaved") in group.said
    assert (2, 1, "delete") not in group.said
    group.notice(1, 3)
    group.deliver("bereaved")
    assert (1, 4, "fence") in group.said
    group.notice(4, 3)
    group.deliver_everything()
    assert group.state(4, grandchild) is State.CONFIRMED
    assert group.remembered(2) == {}
    assert group.protocol(1).leaks() == {rref: (1, 0)}


def test_who_is_bereaved_after_the_fence_is_told_at_once() -> None:
    owner = Protocol(1)
    rref = owner.own()
    owner.fork(rref, 2)
    owner.peer_lost(2, "gone")
    assert owner.take_actions() == []
    owner.receive(3, ["bereaved", 2])
    assert owner.take_actions() == [Send(3, ["cleared", 2])]


def test_owner_hears_of_a_death_from_the_bereaved() -> None:
    group = Group(3)
    rref, parent = group.own_and_pass_on(2)
    group.call(2, 3, [parent])
    group.release(2, parent)
    group.die(3)
    group.notice(2, 3)
    group.deliver("bereaved")
    assert group.remembered(1)["fences"] > 0
    group.notice(1, 3)
    group.deliver_everything()
    assert group.is_freed(rref)
    group.assert_nothing_left()


def test_a_death_during_a_fence_is_part_of_it() -> None:
    group = Group(4)
    rref, at_two = group.own_and_pass_on(2)
    at_three = group.pass_on(2, 3, at_two)
    at_four = group.pass_on(3, 4, at_three)
    group.die(2)
    group.notice(1, 2)
    group.notice(4, 2)
    group.deliver("fence", to=4)
    group.deliver("fenced")
    group.die(3)
    group.notice(1, 3)
    assert not group.is_freed(rref)
    group.notice(4, 3)
    group.deliver_everything()
    assert group.state(4, at_four) is State.CONFIRMED
    assert group.protocol(1).leaks() == {rref: (1, 0)}


def test_a_death_that_needed_no_fence_is_part_of_the_next() -> None:
    group = Group(4)
    rref, at_two = group.own_and_pass_on(2)
    at_three = group.pass_on(2, 3, at_two)
    at_four = group.pass_on(3, 4, at_three)
    group.die(3)
    group.notice(1, 3)
    assert group.remembered(1) == {"owned": 1, "shared": 1, "forks": 1}
    group.die(2)
    group.notice(1, 2)
    group.notice(4, 2)
    group.deliver("fence")
    group.deliver("fenced")
    assert not group.is_freed(rref)
    group.notice(4, 3)
    group.deliver_everything()
    assert group.state(4, at_four) is State.CONFIRMED
    assert group.protocol(1).leaks() == {rref: (1, 0)}


def test_who_joins_during_a_fence_is_asked_too() -> None:
    owner = Protocol(1)
    rref = owner.own()
    owner.fork(rref, 2)
    owner.peer_joined(2)
    owner.peer_joined(3)
    owner.peer_lost(2, "gone")
    owner.peer_joined(4)
    assert owner.take_actions() == [Send(3, ["fence", 2, "gone"]), Send(4, ["fence", 2, "gone"])]
    owner.receive(3, ["fenced", 2])
    assert owner.leaks() == {rref: (1, 1)}
    owner.receive(4, ["fenced", 2])
    assert owner.leaks() == {rref: (0, 1)}


def test_whose_first_word_comes_during_a_fence_is_asked_too() -> None:
    owner = Protocol(1)
    owner.fork(owner.own(), 2)
    owner.peer_joined(3)
    owner.peer_lost(2, "gone")
    owner.take_actions()
    owner.receive(4, ["bereaved", 2])
    assert owner.take_actions() == [Send(4, ["fence", 2, "gone"])]


def test_a_death_among_workers_without_references_costs_no_message() -> None:
    group = Group(4)
    group.die(2)
    for peer in (1, 3, 4):
        group.notice(peer, 2)
    group.assert_nothing_left()


def test_owner_dies_and_its_references_fail_with_the_reason() -> None:
    group = Group(3)
    _, at_two = group.own_and_pass_on(2)
    pending = group.create(2, 1)
    group.call(2, 3, [at_two])
    dropped = group.pass_on(2, 2, at_two)
    group.release(2, dropped)
    group.die(1)
    group.notice(2, 1)
    for ref in (at_two, pending):
        assert group.state(2, ref) is State.FAILED
        assert group.protocol(2).reason(ref) == "worker 1 died"
    group.notice(3, 1)
    group.arrive(0)
    (orphan,) = group.workers[3].refs
    assert group.state(3, orphan) is State.FAILED
    late = group.create(2, 1)
    assert group.state(2, late) is State.FAILED
    for peer, ref in ((2, at_two), (2, pending), (2, late), (3, orphan)):
        group.release(peer, ref)
    group.deliver_everything()
    group.assert_nothing_left()


def test_creator_dies_with_its_creation_on_the_way() -> None:
    group = Group(3)
    ref = group.create(2, 1)
    group.call(2, 3, [ref])
    group.arrive(1)
    (child,) = group.workers[3].refs
    group.deliver("confirm")
    group.die(2)
    group.notice(1, 2)
    group.deliver("refused")
    assert group.state(3, child) is State.FAILED
    assert "creator was lost before the creation arrived: worker 2 died" in group.protocol(3).reason(child)
    group.release(3, child)
    group.notice(3, 2)
    group.deliver_everything()
    group.assert_nothing_left()


def test_a_tombstone_goes_with_the_creator() -> None:
    owner = Protocol(1)
    owner.receive(2, ["abandon", [2, 1], "it timed out"])
    assert owner.waits_for_sweep
    owner.peer_lost(2, "gone")
    assert not owner.waits_for_sweep


def test_who_asks_after_the_creators_death_is_refused_at_once() -> None:
    owner = Protocol(1)
    owner.peer_lost(2, "gone")
    owner.receive(3, ["confirm", [2, 1], [2, 7]])
    ref = owner.expect((2, 1))
    reason = "its creator was lost before the creation arrived: gone"
    assert owner.take_actions() == [Send(3, ["refused", (2, 7), reason])]
    assert owner.state(ref) is State.FAILED


def test_creator_dies_after_its_creation_and_its_children_live_on() -> None:
    group = Group(3)
    ref = group.create_and_answer(2, 1)
    rref = group.workers[2].refs[ref]
    child = group.pass_on(2, 3, ref)
    group.die(2)
    group.notice(1, 2)
    group.notice(3, 2)
    group.deliver_everything()
    assert group.state(3, child) is State.CONFIRMED
    group.release(3, child)
    group.deliver()
    assert group.is_freed(rref)
    group.assert_nothing_left()


def test_the_dead_are_ignored_for_ever() -> None:
    owner = Protocol(1)
    rref = owner.own()
    _, _, fork = owner.fork(rref, 3)
    owner.peer_joined(4)
    owner.peer_lost(3, "")
    owner.take_actions()
    owner.peer_joined(3)
    owner.receive(3, ["delete", list(rref), list(fork)])
    assert not owner.arrived((3, 1), (3, 2), creator=3)
    late = owner.adopt([1, list(rref), [3, 9]], sender=3)
    elsewhere = owner.adopt([4, [4, 1], [3, 10]], sender=3)
    assert owner.state(late) is State.FAILED
    assert owner.state(elsewhere) is State.FAILED
    assert owner.leaks() == {rref: (1, 1)}
    assert owner.take_actions() == []


def test_a_fork_toward_the_dead_needs_no_parent() -> None:
    for protocol in (Protocol(1), Protocol(2)):
        ref = protocol.own() if protocol.me == 1 else protocol.adopt([1, [1, 1], [1, 2]], sender=1)
        protocol.peer_lost(3, "gone")
        before = protocol.counts()
        protocol.take_back(protocol.fork(ref, 3))
        protocol.fork(ref, 3)
        assert protocol.counts() == before


def test_a_worker_that_asked_and_died_is_not_waited_for() -> None:
    owner = Protocol(1)
    rref = owner.own()
    owner.fork(rref, 2)
    for peer in (2, 3):
        owner.peer_joined(peer)
    owner.receive(3, ["bereaved", 2])
    owner.peer_lost(3, "gone")
    owner.peer_lost(2, "gone")
    assert owner.leaks() == {rref: (0, 1)}
    owner.release(rref)
    assert not any(owner.counts().values())


def test_an_owner_that_raised_a_fence_and_died_is_not_answered() -> None:
    worker = Protocol(4)
    pending = worker.adopt([1, [1, 1], [2, 1]], sender=2)
    worker.receive(1, ["fence", 2, "gone"])
    worker.receive(1, ["fence", 3, "gone"])
    worker.peer_lost(2, "gone")
    worker.peer_lost(1, "gone")
    worker.peer_lost(3, "gone")
    worker.release(pending)
    worker.take_actions()
    assert not any(worker.counts().values())


def test_the_memory_of_the_dead_is_bounded() -> None:
    peers = Peers(1)
    for peer in range(2, 12 + DEAD_MOST):
        assert peers.lost(peer, "gone")
    assert len(peers.dead) == len(peers.unfenced) == DEAD_MOST

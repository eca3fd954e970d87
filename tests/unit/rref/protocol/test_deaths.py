"""The reference protocol, sentence by sentence: who dies, and what becomes of it. Worker 1 is the owner."""

from rref.protocol.machine import Protocol
from rref.protocol.messages import Fence, Send, State
from rref.protocol.peers import DEAD_MOST, Peers
from tests.unit.rref.protocol.group import Group


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


def test_the_memory_of_the_dead_is_bounded() -> None:
    peers = Peers(1)
    for peer in range(2, 12 + DEAD_MOST):
        assert peers.lost(peer, "gone")
    assert len(peers.dead) == len(peers.unfenced) == DEAD_MOST

"""The end of all work, message by message: what a worker says to others, and when a round is over.

That nobody leaves while anything is under way anywhere, and all leave in the end, whoever dies and whatever
connection breaks, is shown by whole agents in ``tests/simulation``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rpc.errors import ProtocolError
from rpc.group.termination import (
    Action,
    ActivityReport,
    CutOff,
    Failed,
    Leave,
    Quiescent,
    SendToWorker,
    Termination,
    Waits,
)
from rpc.group.workers import Member, WorkerInfo

IDLE = ActivityReport(0)


def members(count: int) -> list[Member]:
    """Workers whose incarnations are not in the order of their ranks."""
    return [Member(WorkerInfo(f"worker{rank}", rank), 1000 - 7 * rank, "host", ()) for rank in range(count)]


def entered(count: int, rounds: int = 1, timeout: float = 0.0) -> tuple[Termination, list[int]]:
    """A leader that has entered, as have its peers: it has probed them."""
    group = members(count)
    leader = Termination(group[0], group, rounds)
    peers = [member.incarnation for member in group[1:]]
    leader.enter(0.0, IDLE, timeout)
    for peer in peers:
        leader.receive(peer, [0, "entered"], 0.0, IDLE)
    return leader, peers


def report(
    leader: Termination, peer: int, wave: int, *, lost: Sequence[int] = (), active: int = 0, begun: int = 0
) -> list[Action]:
    return leader.receive(peer, [0, "report", wave, list(lost), active, begun], 0.0, IDLE)


def probes(wave: int, *to: int, dead: Sequence[int] = ()) -> list[Action]:
    return [SendToWorker(peer, [0, "probe", wave, list(dead)]) for peer in sorted(to)]


def test_a_worker_that_was_busy_when_asked_says_once_that_it_is_idle() -> None:
    group = members(2)
    worker, leader = Termination(group[1], group), group[0].incarnation
    worker.enter(0.0, ActivityReport(1))
    worker.receive(leader, [0, "probe", 1, []], 0.0, ActivityReport(1))
    assert worker.became_idle(ActivityReport(1)) == []
    assert worker.became_idle(IDLE) == [SendToWorker(leader, [0, "changed"])]
    assert worker.became_idle(IDLE) == []


def test_idle_group_needs_few_messages() -> None:
    """Of each other: that it has entered, and two reports; to each: two probes, and the end of the round."""
    leader, peers = entered(5)
    for peer in peers[:-1]:
        assert report(leader, peer, 1) == []
    assert report(leader, peers[-1], 1) == probes(2, *peers)
    for peer in peers[:-1]:
        assert report(leader, peer, 2) == []
    ends = [SendToWorker(peer, [0, "quiescent"]) for peer in sorted(peers)]
    assert report(leader, peers[-1], 2) == [*ends, Leave()]


def test_a_worker_says_once_that_it_has_lost_another() -> None:
    group = members(4)
    leader, one, other = (each.incarnation for each in (group[0], *group[2:]))
    worker = Termination(group[1], group)
    worker.enter(0.0, IDLE)
    changed = [SendToWorker(leader, [0, "changed"])]
    assert worker.lost(one, 0.0, IDLE) == changed
    answer = worker.receive(leader, [0, "probe", 1, [one, other]], 0.0, IDLE)
    assert CutOff(other) in answer, "the leader has lost it"
    assert worker.lost(other, 0.0, IDLE) == changed
    assert worker.became_idle(IDLE) == []


def test_late_and_doubled_messages_do_no_harm() -> None:
    leader, (peer,) = entered(2)
    assert report(leader, peer, 7) == []
    assert leader.receive(peer, [0, "entered"], 0.0, IDLE) == []
    assert report(leader, peer, 1) == probes(2, peer)
    assert report(leader, peer, 1) == []
    assert Leave() in report(leader, peer, 2)
    assert report(leader, peer, 2) == []
    assert leader.receive(peer, [0, "probe", 4, []], 0.0, IDLE) == [SendToWorker(peer, [0, "quiescent"])]


def test_message_of_the_next_round_proves_that_this_one_is_over() -> None:
    group = members(2)
    peer = group[1].incarnation
    leader = Termination(group[0], group, rounds=2)
    leader.enter(0.0, IDLE)
    assert leader.receive(peer, [1, "entered"], 0.0, IDLE) == [
        SendToWorker(peer, [0, "quiescent"]),
        Quiescent(),
    ]
    assert leader.enter(0.0, IDLE) == [SendToWorker(peer, [1, "probe", 1, []])]


def test_timeout_names_who_has_not_entered() -> None:
    group = members(4)
    leader = Termination(group[0], group)
    leader.enter(0.0, IDLE, timeout=5.0)
    leader.receive(group[1].incarnation, [0, "entered"], 0.0, IDLE)
    assert leader.next_tick == 5.0
    assert leader.tick(4.9, IDLE) == []
    assert leader.tick(5.0, IDLE) == [
        Failed("shutdown timed out: not in shutdown: worker 'worker2', worker 'worker3'")
    ]


def test_timeout_names_who_has_not_answered_and_who_was_busy_when_it_did() -> None:
    leader, (one, two, three) = entered(4, timeout=5.0)
    report(leader, one, 1)
    assert leader.inquire(IDLE) == [Waits("no answer yet from: worker 'worker2', worker 'worker3'")]
    report(leader, two, 1, active=2)
    report(leader, three, 1)
    leader.receive(one, [0, "changed"], 1.0, IDLE)
    assert leader.tick(5.0, IDLE) == [
        Failed(
            "shutdown timed out: still busy: worker 'worker2' (2 under way); "
            "no answer yet from: worker 'worker1', worker 'worker3'"
        )
    ]


def test_timeout_names_who_has_not_noticed_a_death() -> None:
    leader, (one, two, dead) = entered(4, timeout=5.0)
    leader.lost(dead, 1.0, IDLE)
    report(leader, one, 2, lost=[dead])
    report(leader, two, 2)
    assert leader.tick(5.0, IDLE) == [Failed("shutdown timed out: no answer yet from: worker 'worker2'")]


def test_a_leader_that_is_lost_when_the_time_is_over_is_named() -> None:
    group = members(2)
    worker = Termination(group[1], group)
    worker.enter(0.0, IDLE, timeout=5.0)
    worker.tick(5.0, IDLE)
    (failed,) = worker.lost(group[0].incarnation, 5.5, IDLE)
    assert failed == Failed("shutdown timed out: its leader, worker 'worker0', is gone")


def test_other_workers_ask_the_leader_what_the_timeout_was_for() -> None:
    group = members(3)
    leader, worker = Termination(group[0], group), Termination(group[1], group)
    worker.enter(0.0, IDLE, timeout=5.0)
    (ask,) = worker.tick(5.0, IDLE)
    assert isinstance(ask, SendToWorker)
    (status,) = leader.receive(group[1].incarnation, ask.message, 5.0, IDLE)
    assert isinstance(status, SendToWorker)
    (failed,) = worker.receive(group[0].incarnation, status.message, 5.0, IDLE)
    assert isinstance(failed, Failed)
    assert "'worker0'" in failed.reason
    assert "'worker2'" in failed.reason


def test_leader_that_does_not_answer_is_named() -> None:
    group = members(2)
    worker = Termination(group[1], group)
    worker.enter(0.0, IDLE, timeout=5.0)
    worker.tick(5.0, IDLE)
    assert worker.next_tick == 6.0
    (failed,) = worker.tick(6.0, IDLE)
    assert isinstance(failed, Failed)
    assert "its leader, worker 'worker0', does not answer" in failed.reason


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        ["x", "entered"],
        [0, "what"],
        [0, "report", 1, [], 0],
        [0, "report", 1, 5, 0, 5],
    ],
)
def test_malformed_message_is_refused(message: object) -> None:
    leader, (peer,) = entered(2)
    with pytest.raises(ProtocolError):
        leader.receive(peer, message, 0.0, IDLE)

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.errors import ProtocolError
from rpc.group.counting import Report
from rpc.group.termination import Failed, Leave, Quiescent, Send, Termination
from tests.support.termination_world import World, members

IDLE = Report(0)


def entered(count: int, rounds: int = 1) -> tuple[Termination, list[int], list[object]]:
    """A leader that has entered, and its peers, which have as well."""
    group = members(count)
    leader = Termination(group[0], group, rounds)
    peers = [member.incarnation for member in group[1:]]
    actions: list[object] = list(leader.enter(0.0, IDLE))
    for peer in peers:
        actions += leader.receive(peer, [0, "entered"], 0.0, IDLE)
    return leader, peers, actions


def report(leader: Termination, peer: int, wave: int, **kwargs: object) -> list[object]:
    fields = {"lost": [], "active": 0, "sent": [], "received": []} | kwargs
    return list(leader.receive(peer, [0, "report", wave, *fields.values()], 0.0, IDLE))


# Properties


@given(st.integers(1, 5), st.integers(0, 1 << 32))
@settings(max_examples=150, deadline=None)
def test_nobody_leaves_while_a_call_is_under_way_and_all_leave_in_the_end(count: int, seed: int) -> None:
    chance = Random(seed)
    world = World(count, chance)
    for worker in world.workers.values():
        world.start_program(worker, chance.randint(0, 3), 2)
    world.run_to_end()
    assert all(worker.outcome == "left" for worker in world.workers.values())


@given(st.integers(2, 5), st.integers(0, 1 << 32))
@settings(max_examples=250, deadline=None)
def test_the_same_with_workers_that_die_at_any_step(count: int, seed: int) -> None:
    chance = Random(seed)
    world = World(count, chance)
    for worker in world.workers.values():
        world.start_program(worker, chance.randint(0, 3), 2)
    for _ in range(chance.randint(1, count - 1)):
        for _ in range(chance.randint(0, 120)):
            world.step()
        world.kill_one()
    world.run_to_end()
    assert all(worker.outcome in ("left", "") for worker in world.workers.values())
    assert not any(worker.running for worker in world.workers.values())


@given(st.integers(2, 5), st.integers(0, 1 << 32))
@settings(max_examples=150, deadline=None)
def test_the_same_with_connections_that_break(count: int, seed: int) -> None:
    chance = Random(seed)
    world = World(count, chance)
    for worker in world.workers.values():
        world.start_program(worker, chance.randint(0, 3), 2)
    for _ in range(chance.randint(0, 120)):
        world.step()
    alive = [worker for worker in world.workers.values() if worker.running]
    if len(alive) > 1:
        world.cut(*chance.sample(alive, 2))
    world.run_to_end()
    assert not any(worker.running for worker in world.workers.values())


@given(st.integers(2, 4), st.integers(0, 1 << 32))
@settings(max_examples=100, deadline=None)
def test_with_a_timeout_it_ends_though_one_never_enters(count: int, seed: int) -> None:
    chance = Random(seed)
    world = World(count, chance)
    absent = chance.choice(list(world.workers.values()))
    absent.absent = True
    for worker in world.workers.values():
        worker.timeout = 5.0
        world.start_program(worker, chance.randint(0, 3), 1)
    world.run_to_end()
    names = {member.incarnation: member.name for member in members(count)}
    outcomes = [worker.outcome for worker in world.workers.values() if worker is not absent]
    assert all("shutdown timed out" in outcome for outcome in outcomes), outcomes
    if absent.peer != max(world.workers):
        assert any(f"not in shutdown: worker '{names[absent.peer]}'" in outcome for outcome in outcomes)


# Cases


def test_alone_leaves_at_once() -> None:
    (me,) = members(1)
    assert Termination(me, [me]).enter(0.0, IDLE) == [Leave()]


def test_alone_but_busy_leaves_when_idle() -> None:
    (me,) = members(1)
    termination = Termination(me, [me])
    assert termination.enter(0.0, Report(1)) == []
    assert termination.became_idle(1.0, IDLE) == [Leave()]


def test_no_wave_before_all_have_entered() -> None:
    group = members(3)
    leader = Termination(group[0], group)
    assert leader.enter(0.0, IDLE) == []
    assert leader.receive(group[1].incarnation, [0, "entered"], 0.0, IDLE) == []
    probes = leader.receive(group[2].incarnation, [0, "entered"], 0.0, IDLE)
    assert [(action.peer, action.message) for action in probes if isinstance(action, Send)] == [
        (member.incarnation, [0, "probe", 1, []]) for member in sorted(group[1:], key=lambda m: m.incarnation)
    ]


def test_two_equal_waves_are_needed() -> None:
    leader, (peer,), _ = entered(2)
    assert report(leader, peer, 1) == [Send(peer, [0, "probe", 2, []])]
    assert report(leader, peer, 2) == [Send(peer, [0, "quiescent"]), Leave()]


def test_counts_that_changed_between_waves_are_no_proof() -> None:
    leader, (one, two), _ = entered(3)
    for wave, calls in enumerate([1, 2, 2], 1):
        report(leader, one, wave, sent=[[two, calls]])
        actions = report(leader, two, wave, received=[[one, calls]])
        assert (Leave() in actions) == (wave == 3)


def test_a_call_on_its_way_is_waited_for_ever_more_slowly() -> None:
    leader, (one, two), _ = entered(3)
    pauses = []
    now = 0.0
    for wave in range(1, 10):
        leader.receive(one, [0, "report", wave, [], 0, [[two, 1]], []], now, IDLE)
        assert leader.receive(two, [0, "report", wave, [], 0, [], []], now, IDLE) == []
        due = leader.next_tick
        assert due is not None
        pauses.append(due - now)
        now = due
        assert leader.tick(now, IDLE)
    assert pauses == sorted(pauses)
    assert pauses[0] <= 0.001
    assert pauses[-1] == pytest.approx(0.05)


def test_a_busy_worker_is_not_asked_again_before_it_says_that_it_is_idle() -> None:
    leader, (peer,), _ = entered(2)
    assert report(leader, peer, 1, active=2) == []
    assert leader.next_tick is None
    actions = leader.receive(peer, [0, "idle"], 10.0, IDLE)
    assert actions == [Send(peer, [0, "probe", 2, []])]


def test_a_worker_that_was_busy_when_asked_says_once_that_it_is_idle() -> None:
    group = members(2)
    worker, leader = Termination(group[1], group), group[0].incarnation
    worker.enter(0.0, Report(1))
    worker.receive(leader, [0, "probe", 1, []], 0.0, Report(1))
    assert worker.became_idle(0.0, Report(1)) == []
    assert worker.became_idle(0.0, IDLE) == [Send(leader, [0, "idle"])]
    assert worker.became_idle(0.0, IDLE) == []


def test_idle_group_needs_few_messages() -> None:
    world = World(5, Random(0))
    world.chance.random = lambda: 0.9  # type: ignore[method-assign]  # nothing doubled, nothing given back
    world.run_to_end()
    assert world.posted == 2 * 4 * (1 + 2 + 2 + 1)  # rounds, peers: entered, probes, reports, quiescent


def test_dead_worker_is_not_waited_for() -> None:
    leader, (one, two), _ = entered(3)
    report(leader, one, 1)
    actions = leader.lost(two, 0.0, IDLE)
    assert actions == [Send(one, [0, "probe", 2, [two]])]
    assert report(leader, one, 2, lost=[], sent=[[two, 5]]) == []  # still has a connection to the dead
    leader.receive(one, [0, "idle"], 1.0, IDLE)
    report(leader, one, 3, lost=[two], sent=[[two, 5]])
    assert Leave() in report(leader, one, 4, lost=[two], sent=[[two, 5]])


def test_connection_broken_between_two_others_must_be_known_to_both() -> None:
    leader, (one, two), _ = entered(3)
    report(leader, one, 1, lost=[two], sent=[[two, 1]])
    assert report(leader, two, 1) == []
    assert leader.tick(1.0, IDLE)
    for wave in (2, 3):
        report(leader, one, wave, lost=[two], sent=[[two, 1]])
        actions = report(leader, two, wave, lost=[one])
    assert Leave() in actions


def test_worker_cuts_off_whom_the_leader_holds_dead_before_it_counts_as_clean() -> None:
    group = members(3)
    leader, _, dead = (member.incarnation for member in group)
    worker = Termination(group[1], group)
    worker.enter(0.0, IDLE)
    cut, answer = worker.receive(leader, [0, "probe", 1, [dead]], 0.0, IDLE)
    assert cut.peer == dead  # type: ignore[union-attr]
    assert answer == Send(leader, [0, "report", 1, [], 0, [], []])
    assert worker.lost(dead, 0.0, IDLE) == [Send(leader, [0, "idle"])]


def test_all_announce_themselves_to_the_next_leader() -> None:
    group = members(3)
    first, second, _ = (member.incarnation for member in group)
    worker = Termination(group[2], group)
    assert worker.enter(0.0, IDLE) == [Send(first, [0, "entered"])]
    assert worker.lost(first, 0.0, IDLE) == [Send(second, [0, "entered"])]
    assert worker.leader == second
    assert Leave() in worker.lost(second, 0.0, IDLE)


def test_late_and_doubled_messages_do_no_harm() -> None:
    leader, (peer,), _ = entered(2)
    assert report(leader, peer, 7) == []
    assert leader.receive(peer, [0, "entered"], 0.0, IDLE) == []
    report(leader, peer, 1)
    assert report(leader, peer, 1) == []
    report(leader, peer, 2)
    assert report(leader, peer, 2) == []
    assert leader.receive(peer, [0, "probe", 4, []], 0.0, IDLE) == [Send(peer, [0, "quiescent"])]
    assert leader.is_over


def test_message_of_the_next_round_proves_that_this_one_is_over() -> None:
    group = members(2)
    leader = Termination(group[0], group, rounds=2)
    leader.enter(0.0, IDLE)
    actions = leader.receive(group[1].incarnation, [1, "entered"], 0.0, IDLE)
    assert actions == [Send(group[1].incarnation, [0, "quiescent"]), Quiescent()]
    assert leader.enter(0.0, IDLE) == [Send(group[1].incarnation, [1, "probe", 1, []])]


def test_timeout_names_who_has_not_entered_and_who_is_busy() -> None:
    group = members(4)
    leader = Termination(group[0], group)
    leader.enter(0.0, IDLE, timeout=5.0)
    leader.receive(group[1].incarnation, [0, "entered"], 0.0, IDLE)
    assert leader.next_tick == 5.0
    assert leader.tick(4.9, IDLE) == []
    assert leader.tick(5.0, IDLE) == [
        Failed("shutdown timed out: not in shutdown: worker 'worker2', worker 'worker3'")
    ]
    leader, (one, two), _ = entered(3)
    leader._deadline = 5.0
    report(leader, one, 1, active=3)
    report(leader, two, 1)
    assert leader.tick(5.0, IDLE) == [
        Failed("shutdown timed out: still busy: worker 'worker1' (3 under way)")
    ]


def test_other_workers_ask_the_leader_what_the_timeout_was_for() -> None:
    group = members(3)
    leader, worker = Termination(group[0], group), Termination(group[1], group)
    worker.enter(0.0, IDLE, timeout=5.0)
    (ask,) = worker.tick(5.0, IDLE)
    assert isinstance(ask, Send)
    (status,) = leader.receive(group[1].incarnation, ask.message, 5.0, IDLE)
    assert isinstance(status, Send)
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
    assert "'worker0', who leads it, does not answer" in failed.reason


@pytest.mark.parametrize(
    "message",
    [None, [], [0], [0, 1], ["x", "entered"], [0, "what"], [0, "probe"], [0, "report", 1, [], 0, 5, 5]],
)
def test_malformed_message_is_refused(message: object) -> None:
    leader, (peer,), _ = entered(2)
    with pytest.raises(ProtocolError):
        leader.receive(peer, message, 0.0, IDLE)

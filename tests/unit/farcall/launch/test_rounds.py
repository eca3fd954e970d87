"""When workers run, stop and end on all machines: the coordinator's orders, without processes or a store."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from farcall.launch.failures import Failure
from farcall.launch.rounds import SILENT_SECONDS, Coordinator, Kind, Launcher, Order, Report, State, placed

KILLED = Failure(0, 10, -9, 2.0, host="a")
LOST_IT = Failure(1, 11, 1, 1.0, "WorkerLostError: worker0 is lost", "Traceback ...", "b", is_loss=True)
STOP_SECONDS = 40.0


def launchers(count: int) -> list[Launcher]:
    return [Launcher(index, count, 2, f"host{index}", 100 + index) for index in range(count)]


class World:
    """A coordinator, and launchers that do as they are told, or not."""

    def __init__(self, count: int = 2, restarts: int = 0) -> None:
        self.launchers, _ = placed(launchers(count))
        self.coordinator = Coordinator(self.launchers, restarts, STOP_SECONDS)
        self.reports: dict[int, Report] = {}
        self.silent: dict[int, float] = {}
        self.now = 0.0

    def say(self, index: int, state: State, *failures: Failure, leaves: str = "", status: int = 0) -> None:
        self.reports[index] = Report(state, self.coordinator.order.round, failures, leaves, status)

    def order(self) -> Order:
        self.over = self.coordinator.step(self.reports, self.silent, self.now)
        return self.coordinator.order


def test_a_job_ends_with_success_when_all_launchers_are_done() -> None:
    world = World()
    world.say(0, State.DONE)
    assert world.order().kind is Kind.RUN
    world.say(1, State.DONE)
    assert world.order() == Order(Kind.END)


def test_a_launcher_whose_workers_have_succeeded_starts_them_again_when_others_fail() -> None:
    """Workers that only serve end with success after a peer's death."""
    world = World(restarts=1)
    world.say(0, State.DONE)
    world.say(1, State.FAILED, KILLED)
    assert world.order() == Order(Kind.STOP, 0, KILLED)
    world.say(0, State.STOPPED)
    assert world.order().kind is Kind.STOP
    world.say(1, State.STOPPED, KILLED)
    assert world.order() == Order(Kind.RUN, 1, KILLED)


def test_a_job_whose_workers_were_preempted_is_not_started_again() -> None:
    saved = Failure(0, 10, 75, 2.0, host="a")
    world = World(restarts=3)
    world.say(1, State.FAILED, LOST_IT)
    world.order()
    world.say(0, State.STOPPED, saved)
    world.say(1, State.STOPPED, LOST_IT)
    assert world.order() == Order(Kind.END, 0, saved, status=75)


def test_what_was_said_of_an_earlier_round_does_not_count() -> None:
    world = World(restarts=2)
    for index in (0, 1):
        world.say(index, State.FAILED, KILLED)
    world.order()
    for index in (0, 1):
        world.say(index, State.STOPPED, KILLED)
    assert world.order().round == 1
    assert world.order() == Order(Kind.RUN, 1, KILLED)


def test_the_job_ends_with_the_cause_and_not_with_what_was_heard_first() -> None:
    world = World()
    world.say(1, State.FAILED, LOST_IT)
    assert world.order() == Order(Kind.STOP, 0, LOST_IT)
    world.say(1, State.STOPPED, LOST_IT)
    world.say(0, State.STOPPED, KILLED)
    assert world.order() == Order(Kind.END, 0, KILLED, status=137)


@pytest.mark.parametrize("state", [State.WAITING, State.RUNNING, State.DONE, State.FAILED])
def test_a_silent_launcher_ends_the_job(state: State) -> None:
    world = World(restarts=9)
    world.say(1, state, *([KILLED] if state is State.FAILED else []))
    world.silent = {1: SILENT_SECONDS + 1}
    assert "the launcher on host1 (node 1, process 101) is gone" in world.order().reason
    world.say(0, State.LEFT)
    world.order()
    assert world.over


def test_a_launcher_that_is_ended_ends_the_job_with_its_status() -> None:
    world = World(restarts=9)
    world.say(1, State.RUNNING, leaves="was ended by SIGTERM", status=143)
    reason = "the launcher on host1 (node 1, process 101) was ended by SIGTERM"
    assert world.order() == Order(Kind.END, reason=reason, status=143)


def test_a_launcher_that_does_not_stop_is_not_waited_for() -> None:
    world = World(restarts=9)
    world.say(0, State.FAILED, KILLED)
    world.order()
    world.say(0, State.STOPPED, KILLED)
    world.say(1, State.RUNNING)
    world.now += STOP_SECONDS + 1
    assert "host1 (node 1, process 101) has not ended its workers within 40 s" in world.order().reason
    world.say(0, State.LEFT)
    world.order()
    assert not world.over
    world.now += STOP_SECONDS + 1
    world.order()
    assert world.over


@pytest.mark.parametrize("seed", range(200))
def test_every_job_ends_whatever_its_launchers_do(seed: int) -> None:
    """Launchers follow orders when they like, fail, fall silent or leave. Each round is left in bounded time
    once any worker has failed, and the job is over after the last.
    """
    chance = random.Random(seed)
    world = World(count=3, restarts=chance.randrange(4))
    dead: set[int] = set()
    over_at = None
    for _ in range(20_000):
        world.now += 0.2
        order = world.order()
        if world.over:
            over_at = world.now
            break
        for index in range(3):
            if index in dead:
                world.silent[index] = world.silent.get(index, 0) + 0.2
                continue
            if index and chance.random() < 0.001:
                dead.add(index)
            report = world.reports.get(index, Report(State.WAITING))
            if chance.random() < 0.3:
                world.reports[index] = following(order, report, chance)
    assert over_at is not None
    assert world.coordinator.order.kind is Kind.END


def following(order: Order, report: Report, chance: random.Random) -> Report:
    """The next report of a launcher that has taken in an order, or has not."""
    if order.kind is Kind.END:
        return replace(report, state=State.LEFT)
    if order.kind is Kind.STOP and report.round == order.round:
        return replace(report, state=State.STOPPED)
    if order.round > report.round or report.state is State.WAITING:
        return Report(State.RUNNING, order.round)
    if report.state is State.RUNNING:
        state = chance.choice([State.RUNNING, State.DONE, State.FAILED])
        return Report(state, order.round, (KILLED,) if state is State.FAILED else ())
    return report


def test_launchers_without_ranks_are_placed_as_they_came() -> None:
    found, refusal = placed(launchers(3))
    assert not refusal
    assert [(each.index, each.node_rank, each.first_rank) for each in found] == [
        (0, 0, 0),
        (1, 1, 2),
        (2, 2, 4),
    ]


def test_ranks_count_before_the_order_of_arrival() -> None:
    first, second, third = launchers(3)
    came = [replace(first, node_rank=0), replace(second, node_rank=2, workers=5), replace(third, node_rank=1)]
    found, _ = placed(came)
    assert [(each.index, each.first_rank) for each in found] == [(0, 0), (2, 2), (1, 4)]


def test_a_rank_given_twice_is_refused_by_name() -> None:
    first, second = (replace(each, node_rank=0) for each in launchers(2))
    _, refusal = placed([first, second])
    assert "host0 (node 0, process 100) and the launcher on host1 (node 0, process 101)" in refusal


def test_ranks_are_for_all_or_for_none() -> None:
    first, second = launchers(2)
    _, refusal = placed([replace(first, node_rank=0), second])
    assert "the launcher on host1 (process 101) was not" in refusal


def test_reports_and_orders_cross_the_store_as_they_are() -> None:
    report = Report(State.FAILED, 3, (KILLED, LOST_IT), "was ended by SIGTERM", 143)
    order = Order(Kind.STOP, 3, LOST_IT, "why", 7)
    launcher = replace(launchers(2)[1], node_rank=1, first_rank=4)
    assert Report.from_json(report.to_json()) == report
    assert Order.from_json(order.to_json()) == order
    assert Launcher.unpack(launcher.pack()) == launcher

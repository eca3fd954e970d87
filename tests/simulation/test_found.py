"""What simulated lives have found, each in a few steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rpc
from tests.simulation.gradients import BACKWARD
from tests.simulation.life import Deed, Life, Plan
from tests.simulation.programs import Thing, introduce, serve
from tests.simulation.truth import Truth
from tests.simulation.worker import Worker

QUIET = replace(
    Plan.of(0),
    workers=2, static=True, lost_after=6.0, reconnect_within=5.0, latency=0.01, tail=0.0, excused=False,
    deeds=(), leave=False,
)  # fmt: skip


def connect(life: Life, here: Worker, there: Worker) -> None:
    """Let one worker call the other, until a connection is made, and the hello on its way."""
    here.loop.call_soon(introduce, life.truth, here, there.name)
    while not life.network.live():
        life.clock.run(0.001)
    life.clock.run(0.001)


def test_a_worker_whose_end_of_a_connection_went_unheard_is_greeted_again() -> None:
    life = Life(QUIET)
    with life.begun() as (here, there):
        connect(life, here, there)
        (end,) = life.network.live()
        life.network.cut(end if end.place == there.place else end.other, half=True)
        life.end()


def test_a_worker_that_has_crossed_another_lets_that_one_in() -> None:
    life = Life(replace(QUIET, seed=2, lost_after=30.0, reconnect_within=30.0))
    with life.begun() as workers:
        small, large = sorted(workers, key=lambda worker: worker.incarnation)
        large.loop.paused_until = life.clock.now + 12.0
        connect(life, small, large)
        life.clock.run(0.1)
        (end,) = life.network.live()
        life.network.cut(end, half=False, loss=0.0)  # the other finds all hellos at once when it goes on
        life.end()


def test_a_worker_that_awaits_another_whose_hello_is_lost_is_greeted_again() -> None:
    life = Life(QUIET)
    with life.begun() as workers:
        small, large = sorted(workers, key=lambda worker: worker.incarnation)
        connect(life, small, large)
        life.clock.run(1.0)
        (end,) = life.network.live()
        end = end if end.place == small.place else end.other
        life.network.cut(end, half=True)
        while end.open or not life.network.live():
            life.clock.run(0.001)
        (again,) = life.network.live()  # on which the one says hello, and does not learn that it failed
        life.network.cut(again if again.place == large.place else again.other, half=True, loss=1.0)
        life.clock.run(0.1)
        large.loop.call_soon(introduce, life.truth, large, small.name)
        life.end()


def test_a_hello_that_comes_late_ends_no_later_connection() -> None:
    life = Life(replace(QUIET, latency=0.5, lost_after=1.8))
    with life.begun() as (here, there):
        connect(life, here, there)
        life.network.latency = 0.01
        (end,) = life.network.live()
        life.network.cut(end if end.place == here.place else end.other, half=True, loss=0.0)
        life.end()


@pytest.mark.parametrize("host", [False, True])
def test_a_worker_that_has_returned_is_let_in_where_its_end_is_not_noticed_yet(host: bool) -> None:
    """If its host has died, too, the connection to it does not end."""
    life = Life(replace(QUIET, static=False))
    with life.begun() as (here, there):
        there.loop.paused_until = life.clock.now + 1.0
        connect(life, here, there)
        life.clock.run(0.1)
        here.end()
        life.network.kill(here.place, host=host)
        life.clock.run(0.1)
        life.join(here.member.id)
        life.end()


def test_a_reference_to_what_a_worker_had_that_is_known_to_be_gone_and_was_never_met_has_failed() -> None:
    life = Life(replace(QUIET, static=False))
    with life.begun() as (here, there):
        connect(life, here, there)
        life.clock.run(1.0)
        made = life.truth.new_object(there.incarnation, here)
        here.loop.call_soon(
            lambda: life.truth.hold(here, made.tag, rpc.remote(there.name, Thing, (made.tag,)))
        )
        life.clock.run(1.0)
        there.end()
        life.network.kill(there.place, host=True)
        life.join()
        newcomer = life.truth.living[-1]
        life.clock.run(1.0)
        newcomer.agent.group.peers.view.leave(there.incarnation, "another worker found it gone")

        def call_with_the_reference() -> None:
            begun = life.truth.begin("serve", here, newcomer.incarnation, 0.0)
            ((_, ref),) = life.truth.held[here]
            life.truth.follow(
                begun, rpc.rpc_async(newcomer.name, serve, (begun.number, 1, [made.tag], [ref]))
            )

        here.loop.call_soon(call_with_the_reference)
        life.end()


def test_an_object_that_is_given_up_while_it_is_made_leaves_nothing() -> None:
    def make(truth: Truth, here: Worker) -> None:
        for _ in range(20):
            made = truth.new_object(here.incarnation, here)
            ref = rpc.remote(here.name, Thing, args=(made.tag,), timeout=0.0001)
            made.creation = ref._creation
            truth.hold(here, made.tag, ref)

    life = Life(QUIET)
    with life.begun() as (here, _):
        here.loop.call_soon(make, life.truth, here)
        life.clock.run(1.0)
        assert any(each.made and each.creation.error is not None for each in life.truth.objects)
        life.end()


def test_a_worker_that_was_stopped_until_its_time_in_shutdown_is_over_has_not_failed_if_all_has_ended() -> (
    None
):
    told: list[str] = []
    life = Life(replace(QUIET, static=False, leave=True), told.append)
    with life.begun() as (here, there):
        connect(life, here, there)
        life.clock.run(1.0)
        made = life.truth.new_object(there.incarnation, here)
        here.loop.call_soon(
            lambda: life.truth.hold(here, made.tag, rpc.remote(there.name, Thing, (made.tag,)))
        )
        life.clock.run(1.0)
        life.leave(here, timeout=0.5)
        life.clock.run(0.001)  # it gives the reference back
        here.loop.paused_until = life.clock.now + 2.0
        life.end()
    assert any("round 3 is over for " + repr(here) + ": all" in line for line in told)


def test_a_call_that_is_run_after_all_references_were_given_back_brings_none() -> None:
    told: list[str] = []
    life = Life(replace(QUIET, static=False, leave=True), told.append)
    with life.begun() as (here, there):
        connect(life, here, there)
        life.clock.run(1.0)
        made = life.truth.new_object(there.incarnation, there)

        def call_with_a_reference() -> None:
            begun = life.truth.begin("serve", there, here.incarnation, 0.0)
            refs = [rpc.RRef(Thing(made.tag))]
            life.truth.follow(begun, rpc.rpc_async(here.name, serve, (begun.number, 1, [made.tag], refs)))

        here.loop.paused_until = life.clock.now + 2.0
        life.leave(here)
        life.clock.run(0.1)
        there.loop.call_soon(call_with_a_reference)
        life.clock.run(0.1)
        life.end()
    lines = "\n".join(told)
    assert lines.index(f"{here} enters round 2") < lines.index(f"{here} runs call 1 (serve)")


@pytest.mark.parametrize("seed", [0, 41])
def test_a_backward_ends_whose_gradients_are_lost_once_their_sender_has_done_its_part(seed: int) -> None:
    """Two workers that have lost each other live on, and the root hears both."""
    deeds = (Deed(0.1, BACKWARD, seed, 12.0),)
    Life(replace(QUIET, seed=seed, workers=3, static=False, excused=True, seconds=2.0, deeds=deeds)).run()

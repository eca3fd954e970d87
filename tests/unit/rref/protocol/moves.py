"""What can happen in a simulation, as moves: each picks at random what it needs, and makes one step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from rref.protocol.messages import Peer, Ref, State
from tests.unit.rref.protocol.simulation import Simulation

Pick = Callable[[Sequence[Any]], Any]
"""Chooses one of a sequence that is not empty."""

WORKERS_MOST: Final = 7


def usable(simulation: Simulation, peer: Peer) -> list[Ref]:
    """References of ``peer`` that have not failed."""
    worker = simulation.workers[peer]
    return [ref for ref in worker.refs if worker.protocol.state(ref) is not State.FAILED]


def own(simulation: Simulation, pick: Pick) -> None:
    """A worker makes a reference to a value of its own."""
    simulation.own(pick(simulation.living))


def create(simulation: Simulation, pick: Pick) -> None:
    """A worker creates an object on any worker, maybe with a reference among the arguments."""
    peer = pick(simulation.living)
    args = [ref for ref in usable(simulation, peer)[:2] if pick((False, True))]
    simulation.create(peer, pick(list(simulation.workers)), args)


def call(simulation: Simulation, pick: Pick) -> None:
    """A worker sends a reference to any worker, itself too, sometimes two."""
    peer = pick(simulation.living)
    refs = usable(simulation, peer)
    if refs:
        simulation.call(peer, pick(list(simulation.workers)), [pick(refs) for _ in range(pick((1, 1, 2)))])


def fail_to_send(simulation: Simulation, pick: Pick) -> None:
    """A worker tries to."""
    peer = pick(simulation.living)
    refs = usable(simulation, peer)
    if refs:
        simulation.fail_to_send(peer, pick(list(simulation.workers)), pick(refs))


def release(simulation: Simulation, pick: Pick) -> None:
    """A worker drops a reference."""
    peer = pick(simulation.living)
    refs = list(simulation.workers[peer].refs)
    if refs:
        simulation.release(peer, pick(refs))


def expect(simulation: Simulation, pick: Pick) -> None:
    """A fetch of an object that someone holds reaches its owner."""
    held = {rref for peer in simulation.living for rref in simulation.workers[peer].refs.values()}
    there = [
        rref
        for rref in sorted(held)
        if not (truth := simulation.objects[rref]).freed
        and not truth.given_up
        and simulation.workers[truth.owner].alive
    ]
    if there:
        rref = pick(there)
        simulation.expect(simulation.objects[rref].owner, rref)


def arrive(simulation: Simulation, pick: Pick) -> None:
    """Any call arrives."""
    if simulation.calls:
        simulation.arrive(pick(range(len(simulation.calls))))


def finish(simulation: Simulation, pick: Pick) -> None:
    """Any creation has been run."""
    running = [(peer, rref) for peer in simulation.living for rref in simulation.workers[peer].running]
    if running:
        simulation.finish(*pick(running))


def give_up(simulation: Simulation, pick: Pick) -> None:
    """Any creation times out."""
    creating = [(peer, ref) for peer in simulation.living for ref in simulation.workers[peer].creating]
    if creating:
        simulation.give_up(*pick(creating))


def sweep(simulation: Simulation, pick: Pick) -> None:
    """A worker gives up what is late."""
    simulation.sweep(pick(simulation.living))


def die(simulation: Simulation, pick: Pick) -> None:
    """A worker dies, unless it is the last."""
    if len(simulation.living) > 1:
        simulation.die(pick(simulation.living))


def notice(simulation: Simulation, pick: Pick) -> None:
    """A worker finds another dead."""
    unnoticed = simulation.unnoticed()
    if unnoticed:
        simulation.notice(*pick(unnoticed))


def join(simulation: Simulation, pick: Pick) -> None:
    """A worker joins."""
    if len(simulation.workers) < WORKERS_MOST:
        simulation.join()


def break_link(simulation: Simulation, pick: Pick) -> None:
    """The connection between two living workers breaks."""
    if len(simulation.living) > 1:
        one = pick(simulation.living)
        other = pick([peer for peer in simulation.living if peer != one])
        simulation.break_link(one, other)


def control(simulation: Simulation, pick: Pick) -> None:
    """Any control message arrives."""
    if simulation.network.posted:
        simulation.network.deliver(simulation, pick(range(len(simulation.network.posted))))


MOVES: Final[dict[str, Callable[[Simulation, Pick], None]]] = {
    move.__name__: move
    for move in (
        own,
        create,
        call,
        fail_to_send,
        release,
        expect,
        arrive,
        finish,
        give_up,
        sweep,
        die,
        notice,
        join,
        break_link,
        control,
    )
}

BUSY: Final = {"own": 2.0, "create": 4.0, "call": 8.0, "fail_to_send": 1.0, "release": 6.0, "expect": 0.7}
BUSY_NETWORK: Final = {"arrive": 10.0, "finish": 5.0, "control": 14.0, "notice": 2.0}
TROUBLE: Final = {"give_up": 1.2, "sweep": 0.3, "die": 0.3, "join": 0.3, "break_link": 0.5}
MANY: Final = BUSY | BUSY_NETWORK | TROUBLE
"""Many objects, many calls, all sorts of trouble."""
DEADLY: Final = MANY | {
    "own": 0.5, "create": 0.8, "call": 11.0, "control": 5.0, "die": 1.5, "notice": 3.0, "give_up": 0.1
}  # fmt: skip
"""Few objects, passed on from worker to worker faster than owners hear of it, and many deaths."""


def live(seed: int) -> None:
    """Run one simulation from its start to the drain, with what the seed decides."""
    chance = random.Random(seed)
    simulation = Simulation(chance.choice((2, 3, 4)))
    weights = DEADLY if seed % 4 < 2 else MANY
    for name in chance.choices(list(weights), list(weights.values()), k=chance.choice((20, 60, 120))):
        MOVES[name](simulation, chance.choice)
    simulation.drain()

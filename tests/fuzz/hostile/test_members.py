"""An agent survives what strangers and members send it: what has broken something once, some mutations."""

from __future__ import annotations

from tests.fuzz.hostile.members import DEFECTS, Attack, Victim
from tests.support.effort import EFFORT
from tests.support.workers import RunWorkers


def test_an_agent_survives_what_members_and_strangers_send(run_workers: RunWorkers) -> None:
    victim = Victim(run_workers)
    attack = Attack(victim.at, victim.honest_incarnation)
    for data in list(attack.pool):
        attack.send(data)
    attack.send_new(20 * EFFORT)
    assert attack.connections > 20
    assert not victim.wrong()
    assert not victim.left()
    victim.dismiss()
    assert not [words for words in DEFECTS if words in victim.log()]

"""What has broken something once breaks nothing now, and mutated inputs do not either: a few of each, each
time.
"""

from __future__ import annotations

import warnings

import pytest

import rpc
from tests.fuzz.hostile import corpus, members
from tests.fuzz.hostile.campaign import outcome
from tests.fuzz.hostile.cores import TARGETS, Target
from tests.fuzz.hostile.mutation import Mutator
from tests.support.effort import EFFORT
from tests.support.hostile import Target as Worker
from tests.support.hostile import target
from tests.support.orders import add_follower, ask, dismiss, start_followers
from tests.support.workers import RunWorkers

INPUTS = 100 * EFFORT


@pytest.mark.parametrize("part", TARGETS, ids=lambda part: part.name)
def test_what_others_say_breaks_no_rule(part: Target) -> None:
    with warnings.catch_warnings(action="ignore"):
        known = [*part.seeds(), *corpus.load(part.name)]
        mutator = Mutator(seed=EFFORT)
        mutate = mutator.of_values if part.of_values else mutator.of_bytes
        new = [mutate(mutator.chance.choice(known), known) for _ in range(INPUTS)]
        failures = [outcome(part, data) for data in known + new]
    assert [failure for failure in failures if failure is not None] == []


def prepare() -> int:
    for allowed in (members.count, members.remembered, target):
        rpc.allow_function(allowed)
    return members.my_incarnation()


def send_all(at: Worker, honest: int) -> int:
    attack = members.Attack(at, honest)
    for data in attack.pool:
        attack.send(data)
    attack.send_new(20 * EFFORT)
    return attack.connections


def still_works() -> bool:
    return bool(rpc.rpc_sync("worker1", members.count, args=("words",)) == 5)


def test_an_agent_survives_what_members_and_strangers_send(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 1, dynamic=True)
    add_follower(workers, dynamic=True, deserialization="safe")
    ask(workers[1], prepare)
    at = ask(workers[1], target)
    assert ask(workers[0], send_all, at, ask(workers[0], members.my_incarnation)) > 20
    assert ask(workers[0], still_works)
    dismiss(workers)
    log = workers[1].log.read_text()
    assert not [words for words in members.DEFECTS if words in log]

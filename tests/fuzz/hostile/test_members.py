"""An agent survives what strangers and members send it: what has broken something once, some mutations."""

from __future__ import annotations

import rpc
from tests.fuzz.hostile import members
from tests.support.effort import EFFORT
from tests.support.hostile import Target, target
from tests.support.orders import add_follower, ask, dismiss, start_followers
from tests.support.workers import RunWorkers


def prepare() -> int:
    for allowed in (members.count, members.remembered, target):
        rpc.allow_function(allowed)
    return members.my_incarnation()


def send_all(at: Target, honest: int) -> int:
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

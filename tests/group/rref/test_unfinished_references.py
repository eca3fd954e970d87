"""References to objects whose creation never comes: they fail at once, and nobody waits in shutdown."""

from __future__ import annotations

from typing import Any

import pytest

import rpc
from rpc.errors import WorkerLostError
from rpc.runtime.current import current_agent
from rpc.wire.frames import Kind
from tests.support.default_device import not_on_devices
from tests.support.orders import ask, dismiss, start_followers
from tests.support.workers import RunWorkers, Worker

kept: list[Any] = []


def make_at_worker0() -> rpc.RRef[list[int]]:
    rref: rpc.RRef[list[int]] = rpc.remote("worker0", list, timeout=0)
    kept.append(rref)
    return rref


def use_what_worker2_makes(worker: Worker) -> tuple[str, str]:
    with worker.group(lost_after=5, reconnect_within=5):
        worker.report("ready")
        worker.wait_for("go")
        rref = rpc.rpc_sync("worker2", make_at_worker0)
        worker.report("has it")
        with pytest.raises(WorkerLostError) as caught:
            rref.to_here(timeout=0)
        return caught.value.worker, str(caught.value)


def serve(worker: Worker) -> None:
    with worker.group(lost_after=5, reconnect_within=5):
        worker.report("ready")
        worker.wait_for("go")


@not_on_devices("workers with device maps meet when they join")
def test_a_creator_that_dies_before_it_has_met_the_owner_is_named(run_workers: RunWorkers) -> None:
    workers = run_workers.start([serve, use_what_worker2_makes, serve])
    workers.wait_for("ready")
    workers[0].stop()
    workers[1].tell("go")
    workers[1].wait_for("has it")
    workers[2].kill()
    workers[0].resume()
    workers[0].tell("go")
    lost, said = workers[1].result()
    assert lost == "worker2"
    assert "its creator was lost before the creation arrived: worker 'worker2' is gone" in said
    workers[0].result()


def send_forged(owner: str, creator: str) -> None:
    """A call of worker1 with a reference to an object of an owner's that its creator has not made."""
    agent = current_agent()
    peer = agent.group.peers.find("worker1")
    payload = agent.calls.caller.dump_call(int, (), {}, peer)
    made_by, me = agent.group.peers.find(creator).incarnation, agent.incarnation
    payload.header["rref"] = [[agent.group.peers.find(owner).incarnation, [made_by, 1 << 40], [me, 1 << 41]]]
    kept.append(agent.calls.caller.request(peer, Kind.CALL, payload, 0, int))


@pytest.mark.parametrize("owner", ["worker1", "worker2"])
@pytest.mark.parametrize("creator", ["worker0", "worker2"])
def test_a_forged_reference_in_a_request_does_not_keep_its_receiver_in_shutdown(
    run_workers: RunWorkers, owner: str, creator: str
) -> None:
    workers = start_followers(run_workers, 3)
    ask(workers[0], send_forged, owner, creator)
    dismiss(workers)

"""Events of a group: the same call at both its ends, who joins and who is lost."""

from __future__ import annotations

import queue
from typing import Any

import rpc
from rpc import events
from tests.support.workers import RunWorkers, Worker


def watch_the_group(worker: Worker) -> list[Any]:
    if worker.rank:
        worker.wait_for("go")
        with worker.group(dynamic=True):
            pass
        return []
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with worker.group(dynamic=True):
        events.listen(events.PeerJoined, seen.put)
        events.listen(events.PeerLost, seen.put)
        worker.report("listens")
        return [seen.get(), seen.get()]


def test_who_joins_and_who_leaves_is_told(run_workers: RunWorkers) -> None:
    workers = run_workers.start(watch_the_group, 2)
    workers[0].wait_for("listens")
    workers[1].tell("go")
    joined, lost = workers.results()[0]
    assert joined == events.PeerJoined("worker1", joined.id)
    assert (lost.name, lost.id) == ("worker1", joined.id)
    assert "has shut down" in lost.reason


def trace_calls(worker: Worker) -> list[tuple[str, int]]:
    """What this worker has called, or has been called with: the other's name and the call's id."""
    seen: list[tuple[str, int]] = []
    with worker.group():
        if worker.rank == 0:
            with events.listen(events.CallBegun, lambda call: seen.append((call.to, call.call_id))):
                worker.wait_for("traced")
                for number in range(3):
                    rpc.rpc_sync("worker1", abs, (number,))
        else:
            events.listen(events.RequestBegun, lambda call: seen.append((call.source, call.call_id)))
            worker.report("listens")
        rpc.barrier()
    return seen


def test_a_call_has_the_same_id_at_both_ends(run_workers: RunWorkers) -> None:
    workers = run_workers.start(trace_calls, 2)
    workers[1].wait_for("listens")
    workers[0].tell("traced")
    called, served = workers.results()
    ids = [call_id for _, call_id in called]
    assert [to for to, _ in called] == ["worker1"] * 3
    assert [call_id for source, call_id in served if source == "worker0"][:3] == ids

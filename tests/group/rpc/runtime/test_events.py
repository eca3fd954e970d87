"""Events of a group: who joins and who is lost."""

from __future__ import annotations

import queue
from typing import Any

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

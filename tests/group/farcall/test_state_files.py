"""The state files of real workers: what is in them, and when."""

from __future__ import annotations

from pathlib import Path

import rpc
from farcall.observe.installation import observer
from farcall.observe.reader import read_worker
from farcall.observe.state import WorkerState
from tests.support.workers import RunWorkers, Worker, current_worker


def state_of_this_worker() -> WorkerState:
    found = observer()
    assert found is not None
    assert found.path is not None
    return read_worker(found.path)


def read_at_once(worker: Worker) -> tuple[str, str, int, str]:
    with worker.group():
        state = state_of_this_worker()
        return state.name, state.phase, state.incarnation, Path(state.file).parent.name


def test_worker_is_in_its_file_before_others_can_call_it(run_workers: RunWorkers) -> None:
    (name0, phase0, incarnation0, job0), (name1, phase1, incarnation1, job1) = run_workers(read_at_once, 2)
    assert (name0, name1, phase0, phase1) == ("worker0", "worker1", "running", "running")
    assert incarnation0 != incarnation1
    assert job0 == job1


def write_at_once(worker: Worker) -> tuple[str, list[object]]:
    with worker.group():
        if worker.rank == 1:
            return "", []
        call = rpc.rpc_async("worker1", worker_waits)
        found = observer()
        assert found is not None
        assert found.look_now()
        (pending,) = [each for each in state_of_this_worker().calls if each["what"] == "worker_waits"]
        worker.report("looked")
        call.wait()
        return str(pending["to"]), list(pending["defined"])


def worker_waits() -> None:
    current_worker().wait_for("end of the call")


def test_call_in_flight_is_in_the_file_with_the_place_of_its_function(run_workers: RunWorkers) -> None:
    workers = run_workers.start(write_at_once, 2)
    workers[0].wait_for("looked")
    workers[1].tell("end of the call")
    to, (function, file, line) = workers.results()[0]
    assert to == "worker1"
    assert (function, file, line) == ("worker_waits", __file__, worker_waits.__code__.co_firstlineno)

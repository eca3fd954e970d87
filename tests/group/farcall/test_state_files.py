"""The state files of real workers: what is in them, and when."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

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


def call_while_nothing_can_be_written(worker: Worker) -> list[bool]:
    with worker.group():
        found = observer()
        assert found is not None
        looked = [found.look_now()]
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))  # as a full disk: writes fail
        looked.append(found.look_now(0.2))
        rpc.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        found.identify(program="written again")
        while not found.look_now():
            pass
        assert state_of_this_worker().fact("program") == "written again"
        return looked


def test_worker_whose_file_cannot_be_written_works_on_and_writes_when_it_can(run_workers: RunWorkers) -> None:
    assert run_workers(call_while_nothing_can_be_written, 2) == [[True, False]] * 2


def call_without_a_folder(worker: Worker) -> bool:
    file = worker.folder / f"file{worker.rank}"
    file.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARCALL_JOBS_DIR", str(file))
        with worker.group():
            rpc.barrier()
            found = observer()
            return found is not None and found.path is None


def test_worker_that_can_make_no_file_works_on(run_workers: RunWorkers) -> None:
    assert run_workers(call_without_a_folder, 2) == [True, True]

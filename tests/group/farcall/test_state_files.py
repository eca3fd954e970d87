"""The state files of real workers: what is in them, and when."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest

import rpc
from farcall.observe.installation import observer
from farcall.observe.reading.reader import read_worker
from farcall.observe.reading.state import WorkerState
from farcall.observe.worker.observer import Observer
from rpc.errors import WorkerLostError
from tests.support.serving import WAIT_SECONDS
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


def found_a_dynamic_group(worker: Worker, folder: str) -> str:
    """Workers 0 and 1 meet in one file, 2 and 3 in another: two groups, with the same key."""
    options = rpc.AgentOptions(init_method=f"file://{folder}/{worker.rank // 2}", dynamic=True)
    rpc.init_rpc(worker.name, rpc_backend_options=options)
    found = observer()
    assert found is not None
    job = found.job
    rpc.shutdown()
    return job


def test_dynamic_groups_that_meet_at_different_places_are_different_jobs(
    run_workers: RunWorkers, tmp_path: Path
) -> None:
    first, second, third, fourth = run_workers(found_a_dynamic_group, 4, (str(tmp_path),))
    assert first == second != third == fourth


def write_at_once(worker: Worker) -> tuple[str, list[object]]:
    with worker.group():
        if worker.rank == 1:
            return "", []
        call = rpc.rpc_async("worker1", worker_waits)
        found = observer()
        assert found is not None
        assert found.look_now(WAIT_SECONDS)
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


def wait_for_a_worker_that_dies(worker: Worker) -> tuple[list[str], list[str]]:
    """Returns the waits in the state from before the other worker's death, and in the newest one."""
    with pytest.MonkeyPatch.context() as patch, worker.group():
        patch.setattr("farcall.observe.worker.observer._KEEP_SECONDS", 10 * WAIT_SECONDS)
        if worker.rank == 1:
            worker.wait_for("its end")
        found = observer()
        assert found is not None
        told = threading.Thread(target=report_that_a_barrier_is_in_the_file, args=(worker, found))
        told.start()
        with pytest.raises(WorkerLostError):
            rpc.barrier()
        told.join()
        for _ in range(3):
            assert found.look_now(WAIT_SECONDS)
        assert found.path is not None
        return waits_in(read_worker(found.path).as_of(0.0)), waits_in(read_worker(found.path))


def report_that_a_barrier_is_in_the_file(worker: Worker, found: Observer) -> None:
    while "barrier" not in waits_in(state_of_this_worker()):
        found.look_now()
    worker.report("waits")


def waits_in(state: WorkerState) -> list[str]:
    return [str(each["what"]) for thread in state.threads for each in thread.waits]


def test_what_a_lost_worker_was_waited_for_stays_in_the_file_for_a_while(run_workers: RunWorkers) -> None:
    """A launcher reads it once the lost worker's process has ended; meanwhile this worker may go on."""
    workers = run_workers.start(wait_for_a_worker_that_dies, 2)
    workers[0].wait_for("waits")
    workers[1].kill()
    assert workers[0].result() == (["barrier"], [])


def call_while_nothing_can_be_written(worker: Worker) -> list[bool]:
    with worker.group():
        found = observer()
        assert found is not None
        looked = [found.look_now(WAIT_SECONDS)]
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

"""The fixture ``run_workers`` itself: what a test can do with workers, and how their failures look."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.support import leftovers
from tests.support.fork_server import ForkServer
from tests.support.workers import RunWorkers, Worker, WorkersFailed, current_worker


def whoami(worker: Worker) -> tuple[str, int, int, str]:
    return worker.name, worker.rank, worker.world_size, worker.init_method


def test_each_worker_knows_its_place(run_workers: RunWorkers, tmp_path: Path) -> None:
    results = run_workers(whoami, 3)
    assert [result[:3] for result in results] == [("worker0", 0, 3), ("worker1", 1, 3), ("worker2", 2, 3)]
    (init_method,) = {result[3] for result in results}
    assert init_method.startswith(f"file://{tmp_path}")


def test_every_run_has_a_rendezvous_of_its_own(run_workers: RunWorkers) -> None:
    first, second = run_workers(whoami, 1), run_workers(whoami, 1)
    assert first[0][3] != second[0][3]


def scale(worker: Worker, tensor: torch.Tensor, *, factor: int) -> torch.Tensor:
    return tensor * factor + worker.rank


def test_arguments_and_results_may_be_tensors(run_workers: RunWorkers) -> None:
    results = run_workers(scale, 2, args=(torch.arange(3),), kwargs={"factor": 2})
    assert [result.tolist() for result in results] == [[0, 2, 4], [1, 3, 5]]


def test_lambdas_and_closures_run_in_workers(run_workers: RunWorkers) -> None:
    offset = 40
    assert run_workers([lambda _: offset + 2, lambda _: offset + 3]) == [42, 43]


def number_of_threads(_: Worker) -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_worker_starts_with_one_thread_even_when_pytest_has_more(run_workers: RunWorkers) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert run_workers(number_of_threads, 1) == [1]
    finally:
        stop.set()
        thread.join()


def test_workers_come_from_a_process_that_has_pytorch(run_workers: RunWorkers) -> None:
    run_workers(whoami, 1)  # the first may have waited for the import
    before = time.perf_counter()
    run_workers(whoami, 4)
    assert time.perf_counter() - before < 2.0


def ping_pong(worker: Worker) -> int:
    worker.report("ready", worker.rank)
    total = 0
    for _ in range(3):
        total += worker.wait_for("number")
        worker.report("total", total)
    return total


def test_test_and_worker_exchange_events(run_workers: RunWorkers) -> None:
    workers = run_workers.start(ping_pong, 2)
    assert workers.wait_for("ready") == [0, 1]
    for number in (1, 2, 3):
        workers.tell("number", number)
    assert [workers[0].wait_for("total") for _ in range(3)] == [1, 3, 6]
    assert workers.results() == [6, 6]


def report_from_elsewhere(_: Worker) -> None:
    thread = threading.Thread(target=lambda: current_worker().report("from a thread", os.getpid()))
    thread.start()
    thread.join()


def test_any_thread_of_a_worker_may_report(run_workers: RunWorkers) -> None:
    workers = run_workers.start(report_from_elsewhere, 1)
    assert workers[0].wait_for("from a thread") == workers[0].pid


def wait_for_ever(worker: Worker) -> None:
    worker.report("waiting")
    threading.Event().wait()


def test_a_killed_worker_is_no_failure(run_workers: RunWorkers) -> None:
    workers = run_workers.start([whoami, wait_for_ever])
    workers[1].wait_for("waiting")
    workers[1].kill()
    assert workers[1].result() is None
    assert workers[1].exit_status == -signal.SIGKILL
    assert workers.results()[0][0] == "worker0"


def test_a_worker_may_kill_itself(run_workers: RunWorkers) -> None:
    assert run_workers(Worker.die, 1) == [None]


def return_when_interrupted(worker: Worker) -> str:
    try:
        worker.report("waiting")
        worker.wait_for("nothing")
    except KeyboardInterrupt:
        return "interrupted"
    return "not interrupted"


def test_a_worker_can_be_interrupted(run_workers: RunWorkers) -> None:
    workers = run_workers.start(return_when_interrupted, 1)
    workers[0].wait_for("waiting")
    workers[0].interrupt()
    assert workers.results() == ["interrupted"]


def test_a_stopped_worker_goes_on_when_resumed(run_workers: RunWorkers) -> None:
    workers = run_workers.start(ping_pong, 1)
    workers[0].wait_for("ready")
    workers[0].stop()
    assert leftovers.process_state(workers[0].pid) == "T"
    for number in (1, 2, 3):
        workers[0].tell("number", number)
    workers[0].resume()
    assert workers.results() == [6]


def test_a_worker_can_join_later(run_workers: RunWorkers) -> None:
    workers = run_workers.start(whoami, 2)
    workers.add(whoami)
    workers.add(whoami, name="worker0", rank=0)
    assert [result[0] for result in workers.results()] == ["worker0", "worker1", "worker2", "worker0"]


def fail(worker: Worker) -> None:
    if worker.rank == 1:
        print("about to fail")
        raise LookupError("no such thing")


def test_an_exception_fails_the_test_with_worker_traceback_and_output(run_workers: RunWorkers) -> None:
    with pytest.raises(WorkersFailed) as caught:
        run_workers(fail, 2)
    message = str(caught.value)
    assert "worker1: raised" in message
    assert 'raise LookupError("no such thing")' in message
    assert "about to fail" in message
    assert isinstance(caught.value.__cause__, LookupError)
    assert [failure.worker for failure in caught.value.failures] == ["worker1"]


class Unpicklable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not me")


def raise_unpicklable(_: Worker) -> None:
    raise Unpicklable("text remains")


def test_an_exception_that_cannot_be_sent_arrives_as_text(run_workers: RunWorkers) -> None:
    with pytest.raises(WorkersFailed, match="text remains"):
        run_workers(raise_unpicklable, 1)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda _: os._exit(3), "exited with status 3 before returning"),
        (lambda _: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL before returning"),
        (lambda _: os.abort(), "was killed by SIGABRT before returning"),
    ],
)
def test_an_unexpected_end_is_a_failure(run_workers: RunWorkers, end: object, reason: str) -> None:
    with pytest.raises(WorkersFailed, match=reason):
        run_workers([end])  # type: ignore[list-item]


def fail_or_wait(worker: Worker) -> None:
    if worker.rank == 0:
        worker.wait_for("go")
        raise LookupError("first")
    wait_for_ever(worker)


def test_after_a_failure_the_other_workers_are_ended(run_workers: RunWorkers) -> None:
    workers = run_workers.start(fail_or_wait, 2)
    workers[1].wait_for("waiting")
    workers[0].tell("go")
    with pytest.raises(WorkersFailed) as caught:
        workers.results()
    assert [failure.worker for failure in caught.value.failures] == ["worker0", "worker1"]
    assert all(worker.ended for worker in workers)


def test_what_hangs_is_killed_and_shows_its_stacks(run_workers: RunWorkers) -> None:
    with pytest.raises(WorkersFailed) as caught:
        run_workers(wait_for_ever, 2, time_limit=0.5)
    message = str(caught.value)
    assert "the time limit of 0.5 s was over before every worker ends" in message
    assert message.count("in wait_for_ever") == 2


def hang_at_exit(_: Worker) -> str:
    threading.Thread(target=threading.Event().wait).start()
    return "done"


def test_a_thread_that_outlives_the_function_is_a_hang(run_workers: RunWorkers) -> None:
    with pytest.raises(WorkersFailed, match="time limit"):
        run_workers(hang_at_exit, 1, time_limit=0.5)


def test_waiting_for_what_never_comes_fails_when_the_worker_ends(run_workers: RunWorkers) -> None:
    workers = run_workers.start(whoami, 1)
    with pytest.raises(WorkersFailed, match="worker0: ended without reporting 'ready'"):
        workers[0].wait_for("ready")


def leave_a_process(_: Worker) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid


def test_a_process_left_by_a_worker_is_found_and_killed(run_workers: RunWorkers) -> None:
    (pid,) = run_workers(leave_a_process, 1)
    with pytest.raises(WorkersFailed, match=f"left a process behind: process {pid}"):
        run_workers.close()


def test_a_worker_that_the_test_forgot_is_a_failure(run_workers: RunWorkers) -> None:
    run_workers.start(fail, 2)
    with pytest.raises(WorkersFailed, match="no such thing"):
        run_workers.close()


def test_a_process_id_that_is_used_again_has_not_ended_before() -> None:
    ours, servers = socket.socketpair()
    server = ForkServer(0, ours)
    with ours, servers:
        servers.sendall(b'{"exited": 7, "status": 0}\n{"forked": 7}\n')
        server.read_news()
        assert server.exit_status(7) is None
        servers.sendall(b'{"exited": 7, "status": 3}\n')
        server.read_news()
        assert server.exit_status(7) == 3

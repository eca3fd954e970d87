"""What concerns a group as a whole: gathering, barriers, who is in it, defaults, and what an agent tells."""

from __future__ import annotations

import os
import resource
import time
from typing import Any

import pytest

import rpc
from rpc.errors import (
    RpcError,
    RpcTimeoutError,
    WorkerLostError,
)
from rpc.options import AgentOptions
from rpc.runtime.current import current_agent
from tests.support.engine_environments import SRUN
from tests.support.refusals import refused
from tests.support.serving import in_all, in_group, in_worker0, open_gate, wait_at_gate, wait_for_arrivals
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

# ---- its size


def call_all_with_few_files(worker: Worker) -> list[int]:
    """Where a process may open no more files than it has, unless it asks for more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 24, hard))
    with worker.group():
        futures = [
            rpc.rpc_async(f"worker{rank}", divmod, args=(rank, 2)) for rank in range(worker.world_size)
        ]
        return [sum(future.wait()) for future in futures]


@pytest.mark.nightly
def test_a_group_may_need_more_files_than_a_process_may_open_at_first(run_workers: RunWorkers) -> None:
    sums = [sum(divmod(rank, 2)) for rank in range(12)]
    assert run_workers(call_all_with_few_files, 12) == [sums] * 12


# ---- its workers' places


def join_as_srun_says(worker: Worker) -> list[str]:
    where = {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getppid())}
    tasks = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    os.environ.update(SRUN | where | tasks | {"SLURM_PROCID": str(worker.rank)})
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    rpc.init_rpc(rpc_backend_options=AgentOptions(init_method=worker.init_method))
    names = [info.name for info in rpc.get_worker_infos()]
    rpc.shutdown()
    return names


def test_init_rpc_without_arguments_finds_name_and_rank(run_workers: RunWorkers) -> None:
    assert run_workers(join_as_srun_says, 2) == [["worker0", "worker1"]] * 2


def name_itself(worker: Worker) -> str:
    options = AgentOptions(init_method=worker.init_method)
    rpc.init_rpc("trainer{rank}", rank=worker.rank, world_size=2, rpc_backend_options=options)
    name = rpc.get_worker_info().name
    rpc.shutdown()
    return name


def test_a_name_may_contain_the_rank(run_workers: RunWorkers) -> None:
    assert run_workers(name_itself, 2) == ["trainer0", "trainer1"]


# ---- gathering


def gather_in_pairs(worker: Worker) -> list[dict[str, int]]:
    """Each worker gathers with each other one, beginning with itself, and none of the others takes part."""
    gathered = []
    for distance in range(worker.world_size):
        names = {worker.name, f"worker{(distance - worker.rank) % worker.world_size}"}
        gathered.append(rpc.all_gather(worker.rank, names))
    return gathered


def test_some_workers_gather_without_the_others(run_workers: RunWorkers) -> None:
    for rank, gathered in enumerate(run_workers(in_group(gather_in_pairs), 4)):
        partners = [(distance - rank) % 4 for distance in range(4)]
        assert gathered == [{f"worker{each}": each for each in {rank, partner}} for partner in partners]


@pytest.mark.parametrize("alone", [0, 1])
@in_all()
def test_who_gathers_alone_times_out_and_says_who_is_missing(worker: Worker, alone: int) -> None:
    def is_told() -> bool:
        """Unless the leader has been too slow to take what the other gives."""
        return f"waiting for ['worker{1 - alone}']" in refused(
            RpcTimeoutError, "", rpc.all_gather, 1, timeout=0.1
        )

    if worker.rank == alone:
        until(is_told)


def gather_without_the_last(worker: Worker) -> str:
    names = ("worker0", "worker1", "worker2")
    with worker.group():
        if worker.rank == 2:
            worker.wait_for("go")
        if worker.rank == 0:
            until(lambda: current_agent().gathering.missing(names, 0) == ["worker0", "worker2"])
        with pytest.raises(RpcError, match="_all_gather") as caught:
            rpc.all_gather(worker.rank, timeout=0.1 if worker.rank == 0 else 0)
        worker.report("failed")
        return str(caught.value)


def test_when_the_leader_gives_up_it_tells_the_others(run_workers: RunWorkers) -> None:
    workers = run_workers.start(gather_without_the_last, 3)
    for rank in (0, 1):
        workers[rank].wait_for("failed")
    workers[2].tell("go")
    assert all("waiting for ['worker2']" in message for message in workers.results())


def gather_late(worker: Worker) -> None:
    with worker.group():
        if worker.rank == 0:
            for _ in range(2):
                refused(RpcTimeoutError, "", rpc.all_gather, 0, timeout=0.1)
            worker.report("given up")
        else:
            worker.wait_for("given up")
            refused(RpcTimeoutError, r"waiting for \['worker1'\]", rpc.all_gather, 1)


def test_who_comes_when_the_leader_has_given_up_several_times_is_told_why(run_workers: RunWorkers) -> None:
    workers = run_workers.start(gather_late, 2)
    workers[0].wait_for("given up")
    workers[1].tell("given up")
    workers.results()


def gather_with_the_dead(worker: Worker) -> list[str]:
    with worker.group():
        lost = []
        worker.report("gathering")
        for _ in range(2):  # the second time it is known from the start
            with pytest.raises(WorkerLostError, match="'worker1'") as caught:
                rpc.all_gather(worker.rank)
            lost.append(caught.value.worker)
        assert rpc.all_gather(worker.rank, ["worker0", "worker2"]) == {"worker0": 0, "worker2": 2}
    return lost


def be_idle(worker: Worker) -> None:
    with worker.group():
        worker.report("gathering")
        worker.wait_for("never")


def test_gathering_fails_everywhere_when_a_worker_is_killed(run_workers: RunWorkers) -> None:
    workers = run_workers.start([gather_with_the_dead, be_idle, gather_with_the_dead])
    workers.wait_for("gathering")
    workers[1].kill()
    assert workers.results() == [["worker1"] * 2, None, ["worker1"] * 2]


# ---- barriers


def pass_barriers(worker: Worker, names: list[str] | None) -> list[tuple[float, float]]:
    """When this worker came to each barrier and when it had passed it."""
    passed = []
    for number in range(6):
        if number % 3 == worker.rank:
            worker.wait_for("go")  # each is the last one twice
        came = time.monotonic()
        rpc.barrier(names)
        passed.append((came, time.monotonic()))
        worker.report("passed")
    return passed


@pytest.mark.parametrize("names", [None, ["worker0", "worker1", "worker2"]])
def test_nobody_passes_a_barrier_before_all_have_come(
    run_workers: RunWorkers, names: list[str] | None
) -> None:
    def take_part(worker: Worker) -> list[tuple[float, float]]:
        with worker.group():
            return pass_barriers(worker, names) if names is None or worker.name in names else []

    workers = run_workers.start(take_part, 3 if names is None else 4)
    for number in range(6):
        workers[number % 3].tell("go")
        for rank in range(3):
            workers[rank].wait_for("passed")
    times = workers.results()[:3]
    for at_barrier in zip(*times, strict=True):
        assert min(passed for _, passed in at_barrier) >= max(came for came, _ in at_barrier)


# ---- who is there


# ---- defaults


@in_worker0(rpc_timeout=33.0)
def test_the_default_timeout_is_each_workers_own() -> None:
    seen = [rpc.get_rpc_timeout()]
    for seconds in (0.5, 0, 7):
        rpc.set_rpc_timeout(seconds)
        seen.append(rpc.get_rpc_timeout())
    with pytest.raises(ValueError, match="-1"):
        rpc.set_rpc_timeout(-1)
    assert [*seen, rpc.rpc_sync("worker1", rpc.get_rpc_timeout)] == [33.0, 0.5, 0.0, 7.0, 33.0]


# ---- what an agent tells


def debug_info(*names: str) -> list[int]:
    info = rpc.get_debug_info()
    return [info[name] for name in names]


@in_worker0()
def test_debug_info_counts_calls_threads_and_references() -> None:
    references = ("num_owner_rrefs", "num_forks", "num_pending_users", "num_pending_futures")
    assert debug_info(*references) == [0, 0, 0, 0]
    rref: rpc.RRef[list[Any]] = rpc.remote("worker1", list)
    rref._get_future().wait()
    assert rpc.rpc_sync("worker1", debug_info, args=references[:2]) == [1, 1]

    held = [rpc.rpc_async("worker1", wait_at_gate) for _ in range(3)]
    making = rpc.remote("worker1", wait_at_gate)
    assert debug_info("agent.pending_calls", "num_pending_futures") == [4, 1]
    rpc.rpc_sync("worker1", wait_for_arrivals, args=(len([*held, making]),))
    assert rpc.rpc_sync("worker1", debug_info, args=("agent.active_tasks",))[0] >= 5
    rpc.rpc_sync("worker1", open_gate)
    for future in (*held, making._get_future()):
        future.wait()
    assert debug_info("agent.pending_calls", "num_pending_futures") == [0, 0]
    assert debug_info("agent.thread_pool_size", "agent.connected_peers") == [16, 1]
    assert all(isinstance(value, int) for value in rpc.get_debug_info().values())

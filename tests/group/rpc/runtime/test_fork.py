"""``os.fork`` while an agent runs: the child has none, and nothing that it does or leaves undone is felt."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import rpc
from rpc.errors import ForkedProcessError, WorkerLostError
from rpc.options import AgentOptions
from tests.support import backend
from tests.support.serving import in_worker0, open_gate, wait_at_gate
from tests.support.tracked import Tracked
from tests.support.workers import RunWorkers, Worker


def in_child(function: Callable[[], Any]) -> Any:
    """Forks a child that runs a function; its value, or its exception raised."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = function(), None
            except BaseException as error:
                outcome = None, error
            with os.fdopen(writing, "wb") as stream:
                pickle.dump(outcome, stream)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    os.waitpid(pid, 0)
    value, raised = pickle.loads(data)
    if raised is not None:
        raise raised
    return value


def works() -> bool:
    """Whether calls to, from and through the other worker still arrive."""
    total = rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).sum()
    back = rpc.rpc_sync("worker1", rpc.rpc_sync, args=("worker0", torch.add, (2, 3)))
    return (float(total), back) == (4.0, 5)


# ---- the child


def call_in_child() -> list[str]:
    messages = []
    calls: list[Callable[[], Any]] = [
        lambda: rpc.rpc_sync("worker1", int),
        lambda: rpc.rpc_async("worker1", int),
        lambda: rpc.remote("worker1", int),
        lambda: rpc.RRef(1),
        rpc.get_worker_info,
        rpc.shutdown,
    ]
    for call in calls:
        with pytest.raises(ForkedProcessError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


@in_worker0()
def test_a_child_has_no_agent_and_says_so() -> None:
    messages = in_child(call_in_child)
    expected = f"forked from process {os.getpid()}, whose agent stays there. Call init_rpc here"
    assert all(expected in message for message in messages)
    assert in_child(rpc.is_initialized) is False
    assert works()


@in_worker0()
def test_what_a_child_inherits_is_of_no_use_to_it_and_goes_on_here() -> None:
    kept = rpc.remote("worker1", Tracked)
    mine = rpc.RRef([1, 2])
    kept.rpc_sync().say_name()
    future = rpc.rpc_async("worker1", wait_at_gate, args=("", 3))
    tensor = rpc.rpc_sync("worker1", torch.ones, args=(1000,))

    def use() -> float:
        uses: list[Callable[[], Any]] = [
            future.wait,
            kept.to_here,
            kept.rpc_sync().say_name,
            mine.local_value,
        ]
        for each in uses:
            with pytest.raises(ForkedProcessError):
                each()
        tensor.add_(1)  # the child's own copy
        return float(tensor.sum())

    assert in_child(use) == 2000.0
    assert tensor.sum() == 1000.0
    rpc.rpc_sync("worker1", open_gate)
    assert future.wait() == 3
    assert kept.rpc_sync().say_name() == "object"
    assert works()


@pytest.mark.skipif(backend.NAME == "grpc", reason="gRPC cannot be used in a forked child")
@in_worker0()
def test_a_child_may_start_an_agent_of_its_own(worker: Worker) -> None:
    def join() -> int:
        options = AgentOptions(init_method=f"file://{worker.folder / 'other'}")
        rpc.init_rpc("child", rank=0, world_size=1, rpc_backend_options=options)
        value = int(rpc.rpc_sync("child", os.getpid))
        rpc.shutdown()
        return value

    assert in_child(join) != os.getpid()
    assert works()


@contextlib.contextmanager
def callers(count: int) -> Iterator[None]:
    """Threads that make calls all the time, and so hold any lock at any moment."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def call() -> None:
        try:
            while not stop.is_set():
                rref = rpc.remote("worker1", torch.ones, args=(3,))
                assert rref.to_here().sum() == 3
                assert rpc.rpc_sync("worker1", torch.add, args=(1, 2)) == 3
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed


@in_worker0()
def test_forks_while_threads_are_calling() -> None:
    with callers(4):
        for _round in range(20):
            assert len(in_child(call_in_child)) == 6
    assert works()


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index**2))


@in_worker0()
def test_data_loaders_and_pools_that_fork() -> None:
    loader = DataLoader(Squares(), batch_size=8, num_workers=2, multiprocessing_context="fork")
    totals = [float(rpc.rpc_sync("worker1", torch.sum, args=(batch,))) for batch in loader]
    assert sum(totals) == sum(index**2 for index in range(64))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, range(-5, 0)) == [5, 4, 3, 2, 1]
    assert works()


# ---- the parent's end


def fork_a_child_that_stays(worker: Worker) -> None:
    rpc.rpc_sync("worker1", int)
    os.mkfifo(worker.folder / "fifo")
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException), open(worker.folder / "fifo", "rb") as fifo:
            fifo.read()
        os._exit(0)
    worker.report("forked", pid)


def be_killed(worker: Worker) -> None:
    with worker.group():
        fork_a_child_that_stays(worker)
        worker.wait_for("never")


def leave(worker: Worker) -> None:
    with worker.group():
        fork_a_child_that_stays(worker)
        worker.wait_for("go")
        rpc.shutdown(graceful=False)
        worker.report("left")
        worker.die()


def wait_until_lost(worker: Worker) -> str:
    with worker.group():
        with pytest.raises(WorkerLostError, match="'worker0'") as caught:
            rpc.rpc_sync("worker0", wait_at_gate)
        worker.report("lost")
        return caught.value.reason


@pytest.fixture
def run_until_end(run_workers: RunWorkers, tmp_path: Path) -> Iterator[Callable[[Any], Any]]:
    """Starts workers whose first forks a child that stays; ends that child when the test is over."""
    children = []

    def run(task: Any) -> Any:
        workers = run_workers.start([task, wait_until_lost])
        children.append(os.pidfd_open(workers[0].wait_for("forked")))
        return workers

    yield run
    for child in children:
        assert not select.select([child], [], [], 0)[0], "the child has ended before the test"
        with open(tmp_path / "fifo", "wb"):
            pass
        assert select.select([child], [], [], 20)[0]
        os.close(child)


def test_a_killed_parent_is_missed_though_its_child_lives(run_until_end: Callable[[Any], Any]) -> None:
    workers = run_until_end(be_killed)
    workers[0].wait_for("at the gate")
    workers[0].kill()
    workers[1].wait_for("lost")
    workers.results()


def test_a_parent_that_leaves_is_missed_though_its_child_lives(run_until_end: Callable[[Any], Any]) -> None:
    workers = run_until_end(leave)
    workers[0].wait_for("at the gate")
    workers[0].tell("go")
    workers[1].wait_for("lost")
    assert "has shut down without waiting" in workers.results()[1]


# ---- the child's end

SCRIPT = """
import os, sys
import rpc
from rpc.options import AgentOptions

rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=AgentOptions(init_method=sys.argv[1]))
rref = rpc.RRef([1])
rref.rpc_sync().copy()
pid = os.fork()
if pid:
    _, status = os.waitpid(pid, 0)
    print("child ended with", status, "and the parent has", rpc.rpc_sync("worker", len, args=([1, 2],)))
    rpc.shutdown()
"""


def test_a_child_ends_as_any_process_does(tmp_path: Path) -> None:
    """Its interpreter is taken down, and what it inherited of the agent with it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    root = Path(__file__).resolve().parents[4]
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore:This process:DeprecationWarning",
            "script.py",
            f"file://{tmp_path}/store",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == (
        "child ended with 0 and the parent has 2\n",
        "",
        0,
    )


# ---- a forked worker


def tensors_saved_while_it_joins(worker: Worker) -> int:
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), worker.group():
        return len(saved)


def test_autograd_is_used_once_before_calls_are_served(run_workers: RunWorkers) -> None:
    """PyTorch crashes if several threads are the first to save a tensor in a forked process."""
    assert all(run_workers(tensors_saved_while_it_joins, 2))

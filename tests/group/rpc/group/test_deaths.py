"""Workers that die (``kill -9``) at the worst moments: the errors of the others, how soon, and what goes on.

No call here has a time limit, so a worker that is not notified of a death hangs until the test's own limit.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import rpc
from rpc.errors import RpcError, WorkerLostError
from rpc.runtime.current import current_agent
from tests.support.ports import reserved_port
from tests.support.refusals import refused
from tests.support.serving import open_gate, serve, wait_at_gate
from tests.support.streams import until
from tests.support.tracked import Tracked
from tests.support.worker_context import current_worker
from tests.support.workers import RunWorkers, Worker, WorkerProcess

__all__ = ["reserved_port"]

DIED = "the connection was closed by the other side without a goodbye; its process has died, most likely"


def lost(worker: str, number: int) -> str:
    """The pattern of what is said of a worker that was killed."""
    return rf"worker '{worker}'(?: \(id {number}\))? is gone: (?:{DIED}|the connection broke: )"


def my_name(*_: Any) -> str:
    return rpc.get_worker_info().name


def serve_until_told(worker: Worker) -> None:
    """Does what others ask until the test says ``"leave"``; what one leaves to be killed from."""
    with worker.group(rpc_timeout=0):
        worker.report("serving")
        worker.wait_for("leave")


def log_of(worker: WorkerProcess) -> str:
    """All that a worker has printed."""
    return worker.log.read_text()


# ---- the callee


def wait_in_every_way(worker: Worker) -> list[str]:
    """Waits for worker1 in every way there is, at once; what each way raised."""
    dead, gate = "worker1", wait_at_gate

    async def wait_async() -> None:
        await asyncio.gather(*(rpc.rpc_async(dead, gate, args=("asyncio",)) for _ in range(2)))

    def wait_for_all() -> None:
        with rpc.wait_all():
            rpc.rpc_async(dead, gate, args=("wait_all",))
            rpc.rpc_async("worker2", my_name)

    def wait_in_callback() -> None:
        rpc.rpc_async("worker2", my_name).then(lambda _: rpc.rpc_sync(dead, gate, args=("then",))).wait()

    with worker.group(rpc_timeout=0):
        held = rpc.remote(dead, Tracked)
        held.rpc_sync().say_name()
        made = rpc.remote(dead, gate, args=("remote",))
        passed_on = rpc.rpc_async("worker2", rpc.rpc_sync, args=(dead, gate, ("nested",)))
        asked = rpc.rpc_async(dead, gate, args=("future",))
        ways: dict[str, Callable[[], object]] = {
            "rpc_sync": lambda: rpc.rpc_sync(dead, gate, args=("rpc_sync",)),
            "future": asked.wait,
            "collect_all": lambda: [each.value() for each in torch.futures.collect_all([asked]).wait()],
            "asyncio": lambda: asyncio.run(wait_async()),
            "wait_all": wait_for_all,
            "then": wait_in_callback,
            "to_here": made.to_here,
            "proxy": made.rpc_sync().anything,
            "nested": passed_on.wait,
            "all_gather": lambda: rpc.all_gather(1, ["worker0", dead]),
            "barrier": lambda: rpc.barrier([dead, "worker0", "worker2"]),
        }
        with ThreadPoolExecutor(len(ways)) as pool:
            running = {name: pool.submit(way) for name, way in ways.items()}
            until(lambda: sum(call.peer.name == dead for call in current_agent().calls.table.waiting()) == 9)
            worker.report("waiting")
            errors = {name: each.exception() for name, each in running.items()}
        for name, error in errors.items():
            assert isinstance(error, RuntimeError), name
            assert re.search(lost(dead, 1), str(error)), f"{name}: {error}"
        for name in errors.keys() - {"then"}:  # whose errors PyTorch makes RuntimeErrors of their text
            lost_error = errors[name]
            assert isinstance(lost_error, WorkerLostError), name
            assert (lost_error.worker, isinstance(lost_error, ConnectionError)) == (dead, True), name
            assert lost_error.reason in str(lost_error), name
        asked_text = str(errors["rpc_sync"])
        assert asked_text.endswith(". wait_at_gate was not answered")
        uses: tuple[Callable[[], object], ...] = (
            *(held.to_here, held.rpc_sync().say_name, held.remote().say_name),
            lambda: held.rpc_async().say_name().wait(),
            lambda: rpc.rpc_sync("worker2", rpc.RRef.to_here, args=(held,)),
        )
        for use in uses:
            refused(RpcError, lost(dead, 1), use)
        for call in (rpc.rpc_sync, lambda *args: rpc.rpc_async(*args).wait()):
            refused(WorkerLostError, lost(dead, 1), call, dead, my_name)
        refused(WorkerLostError, lost(dead, 1), rpc.all_gather, 1, ["worker0", dead])
        assert rpc.get_worker_info(dead).id == 1  # who it was is still known
        return [rpc.rpc_sync(name, my_name) for name in ("worker0", "worker2")]


def test_whoever_waits_for_a_killed_worker_is_told_which_and_why(run_workers: RunWorkers) -> None:
    workers = run_workers.start([wait_in_every_way, serve_until_told, serve])
    gates = {"rpc_sync", "future", "asyncio", "wait_all", "then", "remote", "nested"}
    while gates:
        gates.discard(workers[1].wait_for("at the gate"))
    workers[0].wait_for("waiting")
    workers[1].kill()
    assert workers[0].result() == ["worker0", "worker2"]
    workers.results()
    for survivor, name in ((workers[0], "worker0"), (workers[2], "worker2")):
        told = f"^worker '{name}': {lost('worker1', 1)}"
        assert len(re.findall(told, log_of(survivor), re.MULTILINE)) == 1


# ---- the caller


def ask_and_hold(worker: Worker) -> None:
    with worker.group():
        kept = [rpc.remote("worker1", Tracked, args=("held",)), rpc.remote("worker1", wait_and_make)]
        rpc.rpc_sync("worker2", keep_for_a_while, args=(kept[0],))
        worker.report("holding")
        rpc.rpc_sync("worker1", wait_at_gate, args=("calling",))


def wait_and_make() -> Tracked:
    return Tracked(wait_at_gate("making", "made too late"))


_kept: list[Any] = []


def keep_for_a_while(rref: rpc.RRef[Any]) -> None:
    assert rref.rpc_sync().say_name() == "held"
    _kept.append(rref)


def use_and_forget(worker: Worker) -> None:
    with worker.group():
        worker.wait_for("caller is dead")
        assert (
            _kept[0].rpc_sync().say_name() == "held"
        )  # the dead one's reference does not count, this one does
        _kept.clear()
        gc.collect()
        worker.wait_for("freed")
        for gate in ("calling", "making"):
            rpc.rpc_sync("worker1", open_gate, args=(gate,))


def test_what_a_killed_caller_left_is_dropped_quietly(run_workers: RunWorkers) -> None:
    workers = run_workers.start([ask_and_hold, serve, use_and_forget])
    assert {workers[1].wait_for("at the gate") for _ in range(2)} == {"making", "calling"}
    workers[0].kill()
    workers[0].result()
    workers[2].tell("caller is dead")
    assert workers[1].wait_for("freed") == "held"
    workers[2].tell("freed")
    assert workers[1].wait_for("freed") == "made too late"
    workers.results()
    assert "Traceback" not in log_of(workers[1])
    assert re.search(lost("worker0", 0), log_of(workers[1]))


# ---- in init_rpc


def join_and_greet(worker: Worker, init_method: str, world_size: int) -> list[str]:
    worker.report("joining")
    worker.world_size = world_size
    worker.join(init_method=init_method, rendezvous_timeout=50)
    names = rpc.all_gather(my_name())
    rpc.shutdown()
    return sorted(names)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_killed_in_init_can_be_started_again_while_the_others_wait(
    run_workers: RunWorkers, reserved_port: int, victim: int
) -> None:
    args = (f"tcp://127.0.0.1:{reserved_port}", 3)
    workers = run_workers.start(join_and_greet, 1, args=args)  # rank 0, who serves the store
    workers.add(join_and_greet, args, rank=2)
    workers.wait_for("joining")
    workers[0 if victim == 0 else 1].kill()
    workers.add(join_and_greet, args, rank=victim)
    workers.add(join_and_greet, args, rank=1)
    assert workers.results().count(["worker0", "worker1", "worker2"]) == 3


# ---- in shutdown, and before


def leave(worker: Worker) -> str:
    with worker.group(rpc_timeout=0):
        worker.report("in the group")
        worker.wait_for("leave")
    return "left"


@pytest.mark.parametrize("victims", [[0], [2], [0, 1]])
def test_a_graceful_shutdown_does_not_wait_for_the_dead(run_workers: RunWorkers, victims: list[int]) -> None:
    workers = run_workers.start(leave, 3)
    workers.wait_for("in the group")
    survivors = [worker for worker in workers if worker.rank not in victims]
    for worker in survivors:
        worker.tell("leave")
    for victim in victims:
        workers[victim].kill()  # perhaps before the others have begun to wait for it, perhaps after
    assert [worker.result() for worker in survivors] == ["left"] * len(survivors)
    workers.results()


def call_and_leave(worker: Worker) -> Any:
    with worker.group(rpc_timeout=0):
        answer = rpc.rpc_async("worker1", wait_at_gate, args=("busy", "answer"))
    return answer.wait()


def open_and_leave(worker: Worker) -> None:
    with worker.group():
        worker.wait_for("leader is dead")
        rpc.rpc_sync("worker1", open_gate, args=("busy",))


def test_a_graceful_shutdown_whose_leader_dies_still_waits_for_all_calls(run_workers: RunWorkers) -> None:
    workers = run_workers.start([serve, serve, call_and_leave, open_and_leave])
    workers[1].wait_for("at the gate")
    workers[0].kill()
    workers[0].result()
    workers[3].tell("leader is dead")
    assert workers.results() == [None, None, "answer", None]


def start_again_from(worker: Worker, died: str) -> list[str]:
    """Everybody but the dead: leaves, and forms a group of its own."""
    with worker.group(rpc_timeout=0):
        refused(WorkerLostError, lost(died, 1), rpc.rpc_sync, died, wait_at_gate)
        first = rpc.rpc_sync("worker0" if worker.rank else "worker2", my_name)
    worker.init_method += "-again"
    worker.rank, worker.world_size = worker.rank // 2, 2
    with worker.group():
        return [first, *sorted(rpc.all_gather(my_name()).values())]


def test_survivors_can_form_a_new_group(run_workers: RunWorkers) -> None:
    again = functools.partial(start_again_from, died="worker1")
    workers = run_workers.start([again, serve_until_told, again])
    for _ in range(2):
        workers[1].wait_for("at the gate")
    workers[1].kill()
    assert workers.results() == [["worker2", "worker0", "worker2"], None, ["worker0", "worker0", "worker2"]]


# ---- the caller


def call_back() -> None:
    current_worker().report("called")
    rpc.rpc_sync("worker0", wait_at_gate, args=("for ever",), timeout=0)


def be_called_by_the_dead(worker: Worker) -> int:
    """The level at which the log says that a call has failed because its caller is gone."""
    levels: list[int] = []
    told = threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            levels.append(record.levelno)
            told.set()

    log = logging.getLogger("rpc.agent.received_requests")
    log.setLevel(logging.INFO)
    log.addHandler(Told())
    worker.join(rpc_timeout=0)
    told.wait()
    rpc.shutdown(graceful=False)
    (level,) = levels
    return level


def call_and_be_killed(worker: Worker) -> None:
    worker.join(rpc_timeout=0)
    rpc.rpc_sync("worker1", call_back)


def test_a_callee_that_fails_since_its_caller_is_gone_shows_no_traceback(run_workers: RunWorkers) -> None:
    workers = run_workers.start([call_and_be_killed, be_called_by_the_dead])
    workers[1].wait_for("called")
    workers[0].kill()
    assert workers[1].result() == logging.INFO
    assert "Traceback" not in log_of(workers[1])

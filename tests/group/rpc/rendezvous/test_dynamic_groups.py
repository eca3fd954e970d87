"""Groups without a fixed size: workers join, leave, die and come back while others work."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import rpc
from rpc.errors import RRefError, WorkerLostError
from rpc.runtime.current import current_agent
from tests.support.orders import add_follower, ask, dismiss, follow_orders, start_followers
from tests.support.ports import reserved_port
from tests.support.streams import until
from tests.support.tracked import Tracked
from tests.support.workers import RunWorkers, Worker, WorkerProcess, Workers

__all__ = ["reserved_port"]


def start(run_workers: RunWorkers, size: int) -> Workers:
    return start_followers(run_workers, size, dynamic=True)


def add(workers: Workers, **place: Any) -> WorkerProcess:
    return add_follower(workers, dynamic=True, **place)


def let_leave(worker: WorkerProcess) -> None:
    worker.tell("order", None)
    worker.result()


def present() -> list[tuple[str, int]]:
    return [(info.name, info.id) for info in rpc.get_worker_infos()]


def call_all() -> list[str]:
    return [rpc.rpc_sync(info, rpc.get_worker_info).name for info in rpc.get_worker_infos()]


# ---- joining


def test_workers_join_one_after_another(run_workers: RunWorkers) -> None:
    workers = start(run_workers, 1)
    for size in (2, 3, 4):
        add(workers)
        names = [f"worker{number}" for number in range(size)]
        assert [ask(worker, present) for worker in workers] == [
            list(zip(names, range(size), strict=True))
        ] * size
        assert [ask(worker, call_all) for worker in workers] == [names] * size
    dismiss(workers)


# ---- leaving


def fail_to_call(name: str) -> str:
    with pytest.raises(WorkerLostError, match=name) as caught:
        rpc.rpc_sync(name, int)
    return caught.value.reason


def test_the_first_worker_leaves_and_the_others_go_on(run_workers: RunWorkers) -> None:
    workers = start(run_workers, 3)
    let_leave(workers[0])
    assert ask(workers[1], fail_to_call, "worker0") == "it has shut down"
    assert ask(workers[1], call_all) == ["worker1", "worker2"]
    add(workers)
    assert ask(workers[3], call_all) == ["worker1", "worker2", "worker3"]
    dismiss(workers)


def test_who_leaves_waits_for_its_own_work_only(run_workers: RunWorkers) -> None:
    workers = start(run_workers, 3)
    workers[2].stop()
    let_leave(workers[1])
    assert ask(workers[0], fail_to_call, "worker1") == "it has shut down"
    workers[2].resume()
    dismiss(workers)


# ---- dying and coming back


def call_store_of_first(worker: Worker, port: int) -> None:
    follow_orders(worker, dynamic=True, init_method=f"tcp://127.0.0.1:{port}")


def test_the_group_outlives_the_first_worker_that_serves_the_store(
    run_workers: RunWorkers, reserved_port: int
) -> None:
    port = reserved_port
    workers = run_workers.start(call_store_of_first, 1, args=(port,))
    workers[0].wait_for("ready")
    for _ in range(2):
        workers.add(call_store_of_first, args=(port,)).wait_for("ready")
    workers[0].kill()
    workers[0].result()
    newcomer = workers.add(call_store_of_first, args=(port,))
    newcomer.wait_for("ready")
    back = workers.add(call_store_of_first, args=(port,), name="worker0", rank=0)
    back.wait_for("ready")
    names = ["worker0", "worker1", "worker2", "worker3"]
    for worker in list(workers)[1:]:
        assert ask(worker, call_all) == names
    dismiss(workers)


def keep_a_store(worker: Worker) -> None:
    """As a launcher does, which is no member."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    worker.report("port", store.port)
    worker.wait_for("never")


def join_at_a_store(worker: Worker, port: int) -> None:
    store = TCPStore("localhost", port, is_master=False)
    options = rpc.AgentOptions(dynamic=True, rendezvous_timeout=30.0)
    rpc.init_with_store(None, store, worker.name, worker.rank, None, options)
    worker.report("ready")
    while (order := worker.wait_for("order")) is not None:
        worker.report("done", order())
    rpc.shutdown()


def test_the_group_outlives_a_store_that_others_keep(run_workers: RunWorkers) -> None:
    workers = run_workers.start(keep_a_store, 1)
    port = workers[0].wait_for("port")
    members = [workers.add(join_at_a_store, args=(port,)) for _ in range(3)]
    for member in members:
        member.wait_for("ready")
    workers[0].kill()
    workers[0].result()
    until(lambda: "no worker can join it any more" in members[0].log.read_text())
    for member in members:
        assert ask(member, call_all) == ["worker1", "worker2", "worker3"]
    members[2].kill()
    for member in members[:2]:
        until(lambda: ask(member, present) == [("worker1", 1), ("worker2", 2)])  # noqa: B023
    assert ask(members[1], call_all) == ["worker1", "worker2"]
    dismiss(workers)


@pytest.mark.parametrize("counter", ["1000000000", "garbage"])
def test_a_stranger_that_writes_to_the_store_does_members_no_harm(
    run_workers: RunWorkers, counter: str
) -> None:
    workers = run_workers.start(keep_a_store, 1)
    port = workers[0].wait_for("port")
    members = [workers.add(join_at_a_store, args=(port,)) for _ in range(2)]
    for member in members:
        member.wait_for("ready")
    TCPStore("localhost", port, is_master=False).set("farcall/default/arrivals", counter)
    members[1].kill()  # so that the other looks through the store
    until(lambda: "newcomers cannot join" in members[0].log.read_text())
    assert ask(members[0], call_all) == ["worker1"]
    members[0].tell("order", None)
    members[0].result()
    workers[0].kill()
    workers.results()
    assert members[0].log.read_text().count("was written to by a process that does not belong") == 1


def watch_others(worker: Worker) -> None:
    def fail(*_: object) -> None:
        raise LookupError("a callback's own error")

    with rpc.on_worker_joined(fail), rpc.on_worker_lost(fail), rpc.on_worker_lost(lambda *_: sys.exit(3)):
        rpc.on_worker_joined(lambda each: worker.report("came", (each.name, rpc.rpc_sync(each, int))))
        rpc.on_worker_lost(lambda each, reason: worker.report("went", (each.name, reason)))
        follow_orders(worker, dynamic=True)


def test_the_program_is_told_who_comes_and_who_is_lost(run_workers: RunWorkers) -> None:
    workers = run_workers.start(watch_others, 1)
    workers[0].wait_for("ready")
    for _ in range(2):
        other = add(workers, name="other", rank=1)
        assert workers[0].wait_for("came") == ("other", 0)
        other.kill()
        other.result()
        name, reason = workers[0].wait_for("went")
        assert (name, bool(reason)) == ("other", True)
    dismiss(workers)


release = threading.Event()


def hold() -> None:
    release.wait()


def end_hold() -> None:
    release.set()


def report_shutdown(worker: Worker) -> None:
    departure = current_agent().lifecycle.departure
    until(lambda: departure.under_way)
    worker.report("in shutdown")


def leave_watching(worker: Worker) -> None:
    """Is in shutdown for as long as a call of its own is under way, and reports who is lost meanwhile."""
    watch = rpc.on_worker_lost(lambda each, reason: worker.report("lost", each.name))
    with watch, worker.group(dynamic=True):
        worker.report("ready")
        worker.wait_for("go")
        rpc.rpc_async("worker1", hold)
        threading.Thread(target=report_shutdown, args=(worker,)).start()


def test_others_that_shut_down_while_this_worker_does_are_not_lost(run_workers: RunWorkers) -> None:
    workers = run_workers.start(leave_watching, 1)
    workers[0].wait_for("ready")
    others = [add(workers) for _ in range(3)]
    workers[0].tell("go")
    workers[0].wait_for("in shutdown")
    let_leave(others[1])
    others[2].kill()
    assert workers[0].wait_for("lost") == "worker3", "it died; worker2 left before it"
    ask(others[0], end_hold)
    let_leave(others[0])
    workers.results()


kept: list[rpc.RRef[Tracked]] = []


def keep_reference() -> str:
    kept.append(rpc.remote("worker1", Tracked))
    return str(kept[-1].rpc_sync().say_name())


def use_old_and_new() -> str:
    with pytest.raises((RRefError, WorkerLostError), match=r"'worker1'.* gone"):
        kept[0].to_here()
    return keep_reference()


def test_a_killed_worker_comes_back_under_its_name(run_workers: RunWorkers) -> None:
    workers = start(run_workers, 2)
    assert ask(workers[0], keep_reference) == "object"
    workers[1].kill()
    workers[1].result()
    back = add(workers, name="worker1", rank=1)
    assert ask(back, present) == [("worker0", 0), ("worker1", 1)]
    assert ask(workers[0], use_old_and_new) == "object"
    assert ask(back, call_all) == ["worker0", "worker1"]
    dismiss(workers)

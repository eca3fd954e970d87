"""Dynamic groups whose members lose sight of each other, and live: one group goes on, never two."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import rpc
from rpc.errors import RpcError
from rpc.transport import tcp
from tests.group.rpc.rendezvous.test_newcomers import reach_each_other
from tests.support.network_namespaces import Hosts, enter, hosts
from tests.support.orders import ask, dismiss, follow_orders
from tests.support.ports import reserved_port
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker, WorkerProcess, Workers

__all__ = ["hosts", "reserved_port"]

pytestmark = pytest.mark.nightly

OPTIONS: dict[str, Any] = {"dynamic": True, "lost_after": 2, "reconnect_within": 2, "rpc_timeout": 0}


def present() -> list[str]:
    return [info.name for info in rpc.get_worker_infos()]


def look_at_all() -> None:
    """Call everybody, so that who is silent is lost."""
    for info in rpc.get_worker_infos():
        with contextlib.suppress(RpcError):
            rpc.rpc_sync(info, int)


def sees(worker: WorkerProcess, names: list[str]) -> None:
    """Wait until these are in the group as a worker sees it."""
    until(lambda: ask(worker, look_at_all) or ask(worker, present) == names)


def follow_orders_on(worker: Worker, hosts: tuple[list[str], list[str]], where: int) -> None:
    names, addresses = hosts
    enter(names[where])
    tcp.SILENT_SECONDS = 5
    follow_orders(
        worker,
        listen=addresses[where],
        init_method=f"tcp://{addresses[0]}:29500",
        token="the token of a test",
        **OPTIONS,
    )


def start_on(run_workers: RunWorkers, hosts: Hosts, places: list[int]) -> Workers:
    at = (hosts.names, hosts.addresses)
    workers = run_workers.start(follow_orders_on, 1, args=(at, places[0]))
    workers[0].wait_for("ready")
    for where in places[1:]:
        workers.add(follow_orders_on, args=(at, where)).wait_for("ready")
    return workers


def test_of_two_halves_that_have_lost_each_other_the_one_with_the_store_is_the_group(
    run_workers: RunWorkers, hosts: Hosts
) -> None:
    workers = start_on(run_workers, hosts, [0, 0, 1, 1])
    reach_each_other(list(workers))
    hosts.set_link(0, "down")
    sees(workers[0], ["worker0", "worker1"])
    sees(workers[1], ["worker0", "worker1"])
    sees(workers[2], ["worker2", "worker3"])
    sees(workers[3], ["worker2", "worker3"])
    hosts.set_link(0, "up")
    for worker in list(workers)[2:]:
        sees(worker, [worker.name])
    only_group(workers, workers.add(follow_orders_on, args=((hosts.names, hosts.addresses), 1)), [0, 1])
    assert "is out of its group: others had lost it" in workers[2].log.read_text()


def only_group(workers: Workers, newcomer: WorkerProcess, ranks: list[int]) -> None:
    """A newcomer, and these, and nobody else, are the group, and each can call each."""
    newcomer.wait_for("ready")
    reach_each_other([*(workers[rank] for rank in ranks), newcomer])
    dismiss(workers)


def test_the_half_that_comes_back_to_a_store_that_the_other_serves_anew_is_out(
    run_workers: RunWorkers, hosts: Hosts
) -> None:
    workers = start_on(run_workers, hosts, [0, 0, 1, 1])
    reach_each_other(list(workers))
    hosts.set_link(0, "down")
    sees(workers[1], ["worker0", "worker1"])
    sees(workers[2], ["worker2", "worker3"])
    sees(workers[3], ["worker2", "worker3"])
    workers[0].kill()
    workers[0].result()
    sees(workers[1], ["worker1"])
    hosts.set_link(0, "up")
    for worker in list(workers)[2:]:
        sees(worker, [worker.name])
    only_group(workers, workers.add(follow_orders_on, args=((hosts.names, hosts.addresses), 0)), [1])


def follow_orders_at(worker: Worker, port: int) -> None:
    follow_orders(worker, init_method=f"tcp://127.0.0.1:{port}", **OPTIONS)


def test_a_worker_that_was_stopped_while_it_served_the_store_is_out_of_the_group(
    run_workers: RunWorkers, reserved_port: int
) -> None:
    workers = run_workers.start(follow_orders_at, 1, args=(reserved_port,))
    workers[0].wait_for("ready")
    for _ in range(2):
        workers.add(follow_orders_at, args=(reserved_port,)).wait_for("ready")
    reach_each_other(list(workers))
    workers[0].stop()
    sees(workers[1], ["worker1", "worker2"])
    sees(workers[2], ["worker1", "worker2"])
    workers[0].resume()
    until(lambda: "is out of its group: others had lost it" in workers[0].log.read_text())
    sees(workers[0], ["worker0"])
    only_group(workers, workers.add(follow_orders_at, args=(reserved_port,)), [1, 2])

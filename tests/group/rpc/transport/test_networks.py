"""Workers on two hosts, whose link is slow, loses packets, or goes down."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import rpc
from rpc.errors import RpcTimeoutError, WorkerLostError
from rpc.runtime.current import current_agent
from rpc.transport import tcp
from tests.support import backend
from tests.support.network_namespaces import Hosts, enter, hosts
from tests.support.orders import ask, dismiss, follow_orders
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker, Workers

__all__ = ["hosts"]

pytestmark = pytest.mark.nightly

MIB = 1 << 20


def echo(value: Any) -> Any:
    return value


def follow_orders_on(worker: Worker, names: list[str], addresses: list[str], silent_seconds: int) -> None:
    enter(names[worker.rank])
    tcp.SILENT_SECONDS = silent_seconds
    options: dict[str, Any] = {"listen": addresses[worker.rank], "reconnect_within": 3}
    if backend.NAME == "grpc":
        options |= {"keepalive": silent_seconds, "keepalive_timeout": silent_seconds}
    follow_orders(worker, **options)


def start(run_workers: RunWorkers, hosts: Hosts, silent_seconds: int = 60) -> Workers:
    workers = run_workers.start(follow_orders_on, 2, args=(hosts.names, hosts.addresses, silent_seconds))
    workers.wait_for("ready")
    return workers


def exchange(megabytes: int) -> bool:
    """Large and small calls at once, both ways."""
    tensor = torch.arange(megabytes * MIB // 4, dtype=torch.int32)
    large = [rpc.rpc_async("worker1", echo, args=(tensor,)) for _ in range(2)]
    small = [rpc.rpc_sync("worker1", echo, args=(index,)) for index in range(20)]
    return small == list(range(20)) and all(torch.equal(future.wait(), tensor) for future in large)


NETWORKS = {
    "good": (),
    "slow": ("delay", "5ms", "1ms"),
    "lossy": ("delay", "1ms", "loss", "1%"),
}


@pytest.mark.parametrize("netem", NETWORKS.values(), ids=NETWORKS)
def test_tensors_cross_the_network(run_workers: RunWorkers, hosts: Hosts, netem: tuple[str, ...]) -> None:
    if netem:
        hosts.disturb(*netem)
    workers = start(run_workers, hosts)
    assert ask(workers[0], exchange, 4)
    dismiss(workers)


waiting: list[rpc.Future[Any]] = []


def begin_large() -> None:
    tensor = torch.ones(16 * MIB)
    waiting.append(rpc.rpc_async("worker1", echo, args=(tensor,), timeout=0))


def small_call_times_out() -> bool:
    begin = time.monotonic()
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker1", echo, args=(1,), timeout=0.5)
    return time.monotonic() - begin < 10


def large_arrives() -> bool:
    return bool(waiting.pop().wait().sum() == 16 * MIB)


def test_calls_time_out_while_the_link_is_down_and_go_on_when_it_is_up(
    run_workers: RunWorkers, hosts: Hosts
) -> None:
    workers = start(run_workers, hosts)
    assert ask(workers[0], exchange, 1)
    workers[1].stop()
    ask(workers[0], begin_large)
    hosts.set_link(0, "down")
    workers[1].resume()
    assert ask(workers[0], small_call_times_out)
    hosts.set_link(0, "up")
    assert ask(workers[0], large_arrives)
    assert ask(workers[0], exchange, 1)
    dismiss(workers)


def large_is_lost() -> bool:
    with pytest.raises(WorkerLostError, match="'worker1'"):
        waiting.pop().wait()
    return True


def waits_until_lost(name: str) -> bool:
    """Without sending anything."""
    peer = current_agent().group.peers.find(name)
    until(lambda: peer.lost)
    return True


@pytest.mark.parametrize("busy", [True, False], ids=["in the middle of a transfer", "while nothing is sent"])
def test_a_link_that_stays_down_ends_all_calls(run_workers: RunWorkers, hosts: Hosts, busy: bool) -> None:
    workers = start(run_workers, hosts, silent_seconds=3)
    assert ask(workers[0], exchange, 1)
    if busy:
        workers[1].stop()
        ask(workers[0], begin_large)
    hosts.set_link(0, "down")
    if busy:
        workers[1].resume()
    if busy:
        assert ask(workers[0], large_is_lost)
    else:
        assert ask(workers[0], waits_until_lost, "worker1")
    assert ask(workers[1], waits_until_lost, "worker0")
    dismiss(workers)

"""Newcomers that cannot reach the members of a dynamic group are refused, and the group goes on as it was."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rpc
from rpc.errors import RpcError
from tests.support import backend
from tests.support.certificates import Authority
from tests.support.network_namespaces import Hosts, enter, hosts
from tests.support.orders import add_follower, ask, dismiss, follow_orders, start_followers
from tests.support.ports import reserved_port
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker, WorkerProcess, Workers

__all__ = ["hosts", "reserved_port"]

TOKEN = "the token of a test"
TCP: dict[str, Any] = {"listen": "127.0.0.1", "transports": ["tcp"], "token": TOKEN}
SOON: dict[str, Any] = {"dynamic": True, "lost_after": 2, "reconnect_within": 2}


def reaches(names: list[str]) -> bool:
    """Whether these are the workers that this one knows, all of which it can then call."""
    infos = rpc.get_worker_infos()
    if [info.name for info in infos] != names:  # one of the others may be gone, which is not known yet
        return False
    return [rpc.rpc_sync(info, rpc.get_worker_info).name for info in infos] == names


def fail_to_join(worker: Worker, options: dict[str, Any]) -> str:
    with pytest.raises(RpcError) as caught:
        worker.join(**options)
    assert not rpc.is_initialized()
    return f"{type(caught.value).__name__}: {caught.value}"


def reach_each_other(workers: list[WorkerProcess]) -> None:
    """Wait until these are the group, and can call each other."""
    names = [each.name for each in workers]
    for each in workers:
        until(lambda: ask(each, reaches, names))  # noqa: B023


def tls_of(folder: Path) -> dict[str, dict[str, Any]]:
    """TLS options by name: the group's, those of an authority that the group does not know, and none."""
    ours = Authority(folder, "ours")
    theirs = Authority(folder, "theirs")
    return {
        "ours": {"tls": ours.issue()},
        "of another authority": {"tls": theirs.issue(ca=ours.certificate)},
        "none": {},
    }


MISMATCHES: dict[tuple[str, str], tuple[str, str]] = {
    ("ours", "none"): (
        "it uses TLS, and the connection does not. Give the option tls= to all workers",
        "it does not use TLS, and this worker does. Give the option tls= to all workers",
    ),
    ("ours", "of another authority"): (
        "it refuses this worker's certificate. All certificates of a group must be",
        "its certificate is refused here",
    ),
}
"""By TLS options of the group and of the newcomer: what the newcomer's error and the members' logs say."""


@backend.over_sockets
@pytest.mark.parametrize(("members", "newcomer"), MISMATCHES)
def test_a_newcomer_with_other_tls_options_is_refused_and_the_group_goes_on(
    run_workers: RunWorkers, tmp_path: Path, members: str, newcomer: str
) -> None:
    tls = tls_of(tmp_path)
    workers = start_followers(run_workers, 3, **SOON, **TCP, **tls[members])
    said = workers.add(fail_to_join, args=(SOON | TCP | tls[newcomer],)).result()
    expected, logged = MISMATCHES[members, newcomer]
    assert said.startswith("NotAdmittedError: 'worker3'")
    assert "can reach none of its members (worker 'worker" in said
    assert all(f"worker 'worker{rank}': " in said for rank in range(3))
    assert expected in said
    until(lambda: logged in workers[0].log.read_text())
    reach_each_other(list(workers)[:3])
    another = add_follower(workers, **SOON, **TCP, **tls[members])
    reach_each_other([*list(workers)[:3], another])
    dismiss(workers)


# ---- after a death


def closes_at_once(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is shut down at the end
        while True:
            listener.accept()[0].close()


def answers(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            with listener.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def is_silent(listener: socket.socket) -> None:
    pass  # the kernel accepts, as for a process that is stopped


@contextlib.contextmanager
def another_program(port: int, behaves: Callable[[socket.socket], None]) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=behaves, args=(listener,))
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@backend.over_sockets
@pytest.mark.parametrize(
    ("name", "behaves"), [("worker0", is_silent), ("another", answers), ("another", closes_at_once)]
)
def test_a_worker_whose_port_another_program_has_now_is_dead(
    run_workers: RunWorkers, reserved_port: int, behaves: Callable[[socket.socket], None], name: str
) -> None:
    here = SOON | TCP | {"listen": f"127.0.0.1:{reserved_port}"}
    workers = start_followers(run_workers, 1, **here)
    workers[0].kill()
    workers[0].result()
    with another_program(reserved_port, behaves):
        newcomer = add_follower(workers, name=name, rank=0, **SOON, **TCP)
        reach_each_other([newcomer])
        dismiss(workers)


@backend.over_sockets
def test_a_worker_whose_port_a_worker_of_another_group_has_now_is_dead(
    run_workers: RunWorkers, reserved_port: int
) -> None:
    here = SOON | TCP | {"listen": f"127.0.0.1:{reserved_port}"}
    workers = start_followers(run_workers, 1, **here)
    workers[0].kill()
    workers[0].result()
    others = start_followers(run_workers, 1, **here)
    newcomer = add_follower(workers, name="worker0", rank=0, **SOON, **TCP)
    reach_each_other([newcomer])
    dismiss(workers)
    dismiss(others)


@backend.over_sockets
def test_a_worker_starts_again_at_its_port(run_workers: RunWorkers, reserved_port: int) -> None:
    workers = start_followers(run_workers, 1, **SOON, **TCP)
    here = SOON | TCP | {"listen": f"127.0.0.1:{reserved_port}"}
    for _ in range(2):
        again = add_follower(workers, name="worker1", rank=1, **here)
        reach_each_other([workers[0], again])
        again.kill()
        again.result()
    dismiss(workers)


# ---- between hosts


def on_host(worker: Worker, hosts: tuple[list[str], list[str], str], where: int) -> dict[str, Any]:
    names, addresses, store = hosts
    enter(names[where])
    return {"listen": addresses[where], "init_method": f"tcp://{store}:29500", "token": TOKEN, **SOON}


def follow_orders_on(worker: Worker, hosts: tuple[list[str], list[str], str], where: int) -> None:
    follow_orders(worker, **on_host(worker, hosts, where))


def fail_to_join_on(worker: Worker, hosts: tuple[list[str], list[str], str], where: int) -> str:
    return fail_to_join(worker, on_host(worker, hosts, where))


def start_on(run_workers: RunWorkers, hosts: Hosts) -> tuple[Workers, tuple[list[str], list[str], str]]:
    """Two members at one end, which listen at its further address and have the store at the other one."""
    at = (hosts.names, hosts.more_addresses, hosts.addresses[0])
    workers = run_workers.start(follow_orders_on, 1, args=(at, 0))
    workers[0].wait_for("ready")
    workers.add(follow_orders_on, args=(at, 0)).wait_for("ready")
    return workers, at


FIREWALLS: dict[str, Callable[[Hosts, int], None]] = {
    "drops what the newcomer sends": Hosts.block,
    "refuses what the newcomer sends": Hosts.refuse,
}


@pytest.mark.parametrize("firewall", FIREWALLS)
def test_a_newcomer_behind_a_firewall_is_refused_and_the_group_goes_on(
    run_workers: RunWorkers, hosts: Hosts, firewall: str
) -> None:
    FIREWALLS[firewall](hosts, 1)
    hosts.block(0)
    workers, at = start_on(run_workers, hosts)
    said = workers.add(fail_to_join_on, args=(at, 1)).result()
    assert said.startswith("NotAdmittedError: 'worker2'")
    reach_each_other(list(workers)[:2])
    newcomer = workers.add(follow_orders_on, args=(at, 0))
    newcomer.wait_for("ready")
    reach_each_other([*list(workers)[:2], newcomer])
    dismiss(workers)


# ---- a damaged store

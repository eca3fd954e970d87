"""The backend GRPC in real processes: what works over it, and what goes wrong as it does over TCP.

``make test-grpc`` runs the other tests of groups over it as well.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_autograd
import rpc
from rpc.runtime.current import current_agent
from tests.support import backend
from tests.support.certificates import Authority
from tests.support.fresh import RunFresh
from tests.support.relay import Relay
from tests.support.streams import until
from tests.support.transfers import MIB, echo
from tests.support.workers import RunWorkers, Worker

TOKEN = "a token that only the tests know"


def join(worker: Worker, **options: Any) -> None:
    given = {"init_method": worker.init_method, "rendezvous_timeout": 30.0, "shared_memory_bytes": 0}
    arguments = backend.use(given | options, "grpc")
    rpc.init_rpc(worker.name, rank=worker.rank, world_size=worker.world_size, **arguments)


def ways_to_work(worker: Worker, options: dict[str, Any]) -> list[str]:
    """Uses a bit of everything; returns where the workers listen."""
    join(worker, **options)
    addresses = list(current_agent().addresses)
    if worker.rank == 0:
        large = torch.arange(4 * MIB)
        futures = [rpc.rpc_async("worker1", echo, args=(large,)) for _ in range(2)]
        assert [rpc.rpc_sync("worker1", echo, args=(number,)) for number in range(100)] == list(range(100))
        assert all(torch.equal(future.wait(), large) for future in futures)
        assert rpc.remote("worker1", echo, args=(large,)).to_here().equal(large)
        with pytest.raises(ZeroDivisionError):
            rpc.rpc_sync("worker1", divmod, args=(1, 0))
        weight = torch.ones(3, requires_grad=True)
        with dist_autograd.context() as context:
            product = rpc.rpc_sync("worker1", torch.mul, args=(weight, 3 * torch.ones(3)))
            dist_autograd.backward(context, [product.sum()])
            assert dist_autograd.get_gradients(context)[weight].equal(3 * torch.ones(3))
    rpc.shutdown()
    return addresses


def test_calls_tensors_references_and_gradients_go_over_grpc(run_workers: RunWorkers) -> None:
    for (address,) in run_workers(ways_to_work, 2, args=({},)):
        assert re.fullmatch(r"grpc:127\.0\.0\.1:\d+", address)


def test_certificates_are_checked_on_both_sides_and_known_by_name(
    run_workers: RunWorkers, tmp_path: Path
) -> None:
    tls = Authority(tmp_path).issue(host="trainer.test")
    for (address,) in run_workers(ways_to_work, 2, args=({"tls": tls, "token": TOKEN},)):
        assert re.fullmatch(r"grpc:127\.0\.0\.1:\d+/trainer\.test", address)


def join_with(worker: Worker, tls: rpc.TlsOptions) -> str:
    with pytest.raises(rpc.errors.InvalidOptionError) as caught:
        join(worker, tls=tls, token=TOKEN)
    return str(caught.value)


def test_a_certificate_that_the_own_authority_has_not_signed_is_refused_at_once(
    run_workers: RunWorkers, tmp_path: Path
) -> None:
    wrong = Authority(tmp_path, "theirs").issue(ca=Authority(tmp_path, "ours").certificate)
    (said,) = run_workers(join_with, 1, args=(wrong,))
    assert "the certificate is not good" in said


# ---- strangers


def come_without_a_ticket(worker: Worker) -> dict[str, Any]:
    """What a stranger hears at this worker's port: of each way to speak to it, status and answer."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    from farcall.grpc.transport import SERVICE

    join(worker, token=TOKEN)
    agent = current_agent()
    at = agent.addresses[0].removeprefix("grpc:")
    said: dict[str, Any] = {}
    with grpc.insecure_channel(at) as channel:
        connect = channel.stream_stream(f"/{SERVICE}/Connect")
        good = agent.group.connections.authenticator.ticket()
        for name, ticket, message in (
            ("none", None, b""),
            ("made up", "00" * 64, b""),
            ("none at all", "x", b""),
            ("garbage", good, b"\xff" * 100),
            ("garbage within", good, b"\x0a\x04GET "),
        ):
            metadata = () if ticket is None else (("farcall-ticket", ticket),)
            call = connect(iter([message]), metadata=metadata, timeout=20)
            try:
                said[name] = b"".join(call), call.code().name
            except grpc.RpcError as error:
                said[name] = error.code().name
        probe = health_pb2.HealthCheckRequest(service=SERVICE)
        said["health"] = health_pb2_grpc.HealthStub(channel).Check(probe, timeout=20).status
        said["services"] = list(ProtoReflectionDescriptorDatabase(channel).get_services())
    rpc.shutdown()
    return said


def test_strangers_are_told_that_a_worker_is_there_and_nothing_else(run_workers: RunWorkers) -> None:
    (said,) = run_workers(come_without_a_ticket, 1)
    assert {said[name] for name in ("none", "made up", "none at all")} == {"UNAUTHENTICATED"}
    for name in ("garbage", "garbage within"):
        answer, status = said[name]
        assert status == "OK"
        assert len(answer) < 32  # the preamble
    assert said["health"] == 1
    assert "farcall.v1.WorkerService" in said["services"]


# ---- faults


HELLO_OF_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def connect_and_begin_no_call(worker: Worker) -> list[bytes]:
    """The last that strangers hear who connect and wait."""
    from farcall.grpc import transport

    transport._UNUSED_SECONDS = 1  # type: ignore[misc]
    join(worker, token=TOKEN)
    host, _, port = current_agent().addresses[0].removeprefix("grpc:").rpartition(":")
    heard: list[bytes] = []
    for said in (b"", HELLO_OF_HTTP2):
        with socket.create_connection((host, int(port)), timeout=20) as stranger:
            stranger.sendall(said)
            while last := stranger.recv(4096):
                pass
            heard.append(last)
    rpc.shutdown()
    return heard


def test_a_connection_on_which_nobody_begins_a_call_is_closed(run_workers: RunWorkers) -> None:
    assert run_workers(connect_and_begin_no_call, 1) == [[b"", b""]]


_counts: dict[int, int] = {}


def count(number: int) -> int:
    _counts[number] = _counts.get(number, 0) + 1
    return number


def counted() -> dict[int, int]:
    return _counts


def join_behind_a_relay(worker: Worker, port: int | None) -> None:
    """With a port, this worker is reached through a relay, and tells the test where it listens itself."""
    join(worker, rpc_timeout=0, advertise=f"127.0.0.1:{port}" if port else None)
    if port:
        from farcall.grpc.transport import GrpcListener

        (listener,) = (
            each
            for each in current_agent().group.connections.connections([])
            if isinstance(each, GrpcListener)
        )
        worker.report("listening", listener.port)


def call_through_a_relay(worker: Worker, port: int) -> int:
    """The relay resets connections; returns how many calls were made."""
    join_behind_a_relay(worker, port if worker.rank else None)
    made = 0
    if worker.rank:
        worker.wait_for("done")
    else:
        worker.wait_for("go")
        for _ in range(5):
            futures = [rpc.rpc_async("worker1", count, args=(made + index,)) for index in range(50)]
            worker.report("calling")
            assert [future.wait() for future in futures] == list(range(made, made + 50))
            made += 50
        assert rpc.rpc_sync("worker1", counted) == dict.fromkeys(range(made), 1)
        worker.report("done")
    rpc.shutdown()
    return made


def test_connections_that_a_proxy_resets_are_made_again_and_calls_run_once(run_workers: RunWorkers) -> None:
    with Relay() as relay:
        workers = run_workers.start(call_through_a_relay, 2, args=(relay.port,))
        relay.target = workers[1].wait_for("listening")
        workers[0].tell("go")
        resets = 0
        for _ in range(5):
            workers[0].wait_for("calling")
            resets += relay.reset()
        workers[0].wait_for("done")
        workers[1].tell("done")
        assert workers.results()[0] == 250
        assert resets


def call_while_relays_refuse(worker: Worker, ports: list[int]) -> None:
    join_behind_a_relay(worker, ports[worker.rank])
    if worker.rank:
        worker.wait_for("done")
    else:
        worker.wait_for("go")
        rpc.rpc_sync("worker1", count, args=(0,))
        worker.report("connected")
        worker.wait_for("refused")
        future = rpc.rpc_async("worker1", count, args=(1,))
        until(lambda: current_agent().group.peers.find("worker1").link.failures > 2)
        worker.report("has tried")
        assert future.wait() == 1
        assert rpc.rpc_sync("worker1", counted) == {0: 1, 1: 1}
        worker.report("done")
    rpc.shutdown()


def test_a_proxy_that_refuses_connections_is_no_proof_that_a_worker_has_died(run_workers: RunWorkers) -> None:
    with Relay() as one, Relay() as other:
        relays = (one, other)
        workers = run_workers.start(call_while_relays_refuse, 2, args=([each.port for each in relays],))
        for relay, worker in zip(relays, workers, strict=True):
            relay.target = worker.wait_for("listening")
        workers[0].tell("go")
        workers[0].wait_for("connected")
        for relay in relays:
            relay.refuse()
        workers[0].tell("refused")
        workers[0].wait_for("has tried")
        for relay in relays:
            relay.listen()
        workers[0].wait_for("done")
        workers[1].tell("done")
        workers.results()


# ---- who does not ask for it


TWO_WORKERS = """
import os, sys
assert "rpc" not in sys.modules
import rpc

child = os.fork()
rank = 0 if child else 1
options = rpc.AgentOptions(init_method=sys.argv[1])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
rpc.rpc_sync(f"worker{1 - rank}", int)
rpc.shutdown()
assert not [name for name in sys.modules if name.partition(".")[0] == "grpc"]
if child:
    assert os.wait() == (child, 0)
"""


@pytest.mark.processes
def test_the_default_backend_does_not_import_grpc(tmp_path: Path, run_fresh: RunFresh) -> None:
    """What the tests' workers are forked from may have imported it."""
    done = run_fresh(TWO_WORKERS, f"file://{tmp_path}/store")
    assert done.returncode == 0, done.stderr


def listen_twice(worker: Worker) -> str:
    join(worker, token=TOKEN)
    taken = current_agent().addresses[0].rpartition(":")[2]
    rpc.shutdown()
    with (
        socket.create_server(("127.0.0.1", int(taken))),
        pytest.raises(OSError, match=r"cannot listen on '127\.0\.0\.1', port \d+: .*in use"),
    ):
        join(worker, token=TOKEN, listen=f"127.0.0.1:{taken}")
    join(worker, token=TOKEN, listen=f"127.0.0.1:{taken}", init_method=worker.init_method + "-2")
    address = current_agent().addresses[0]
    rpc.shutdown()
    return "" if address.endswith(taken) else address


def test_a_port_that_is_taken_is_named_and_one_that_is_free_again_can_be_had(run_workers: RunWorkers) -> None:
    assert run_workers(listen_twice, 1) == [""]

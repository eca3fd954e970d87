"""Large tensors over several connections at once: they arrive whole, whatever becomes of one of them."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from typing import Any

import pytest
import torch

import rpc
from benchmarks.striping import limit_connections
from rpc.bulk.striping import plan
from rpc.errors import SerializationError, WorkerLostError
from rpc.options import AgentOptions
from rpc.runtime.current import current_agent
from rpc.wire.frames import PREAMBLE, Kind
from tests.support.hostile import Hostile, Target, frame, target
from tests.support.orders import ask, dismiss, follow_orders, start_followers
from tests.support.serving import first_of, in_group, report, serve
from tests.support.streams import until
from tests.support.workers import RunWorkers, Worker

MIB = 1 << 20
ACROSS: dict[str, Any] = {"transports": ["tcp"], "shared_memory_bytes": 0}
"""Options of workers that are to behave as if they were on different hosts."""
STRIPED: dict[str, Any] = {**ACROSS, "tcp_stripes": 4}


def echo(value: Any) -> Any:
    return value


def total(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def my_name() -> str:
    return rpc.get_worker_info().name


def stripes_to(name: str) -> list[socket.socket]:
    """The stripes to a worker."""
    agent = current_agent()
    stripes = agent.stripes._stripes.get(agent.peer(name).incarnation)
    return [] if stripes is None else list(stripes.sockets)


def count_stripes(name: str) -> int:
    return len(stripes_to(name))


def open_stripes(name: str = "worker1", count: int = 4) -> bool:
    """Send what stripes are opened after; returns when both sides have them."""
    rpc.rpc_sync(name, echo, args=(1,))
    rpc.rpc_sync(name, total, args=(torch.ones(MIB),))
    until(lambda: count_stripes(name) == count)
    until(lambda: rpc.rpc_sync(name, count_stripes, args=(my_name(),)) == count)
    return True


def exchange(name: str = "worker1", seed: int = 1) -> bool:
    """Large and small calls at once, both ways."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [1, 16_384, 65_537, 262_144, 262_145, MIB, 3 * MIB + 1, 5 * MIB]
    sent = [
        torch.randint(-(1 << 31), 1 << 31, (size,), dtype=torch.int32, generator=generator)
        for size in sizes * 2
    ]
    sent.append(torch.arange(3 * MIB).view(1024, -1).T)
    futures = [rpc.rpc_async(name, echo, args=(tensor,)) for tensor in sent]
    small = [rpc.rpc_sync(name, echo, args=(index,)) for index in range(50)]
    return small == list(range(50)) and all(
        torch.equal(future.wait(), tensor) for future, tensor in zip(futures, sent, strict=True)
    )


def test_tensors_arrive_both_ways_at_once_with_small_calls_between(run_workers: RunWorkers) -> None:
    def task(_: Worker) -> None:
        open_stripes()
        assert exchange()

    first_of(run_workers, task, **STRIPED)


def test_all_may_send_to_all_while_stripes_are_being_opened(run_workers: RunWorkers) -> None:
    def task(worker: Worker) -> None:
        for round_ in range(2):
            for other in range(3):
                if other != worker.rank:
                    assert exchange(f"worker{other}", round_)

    run_workers(in_group(task, **STRIPED), 3)


def test_many_tensors_in_one_message_have_memory_of_their_own(run_workers: RunWorkers) -> None:
    def task(_: Worker) -> None:
        open_stripes()
        sent = {str(index): torch.full((MIB // 8,), index) for index in range(8)}
        back = rpc.rpc_sync("worker1", echo, args=(sent,))
        back["0"].fill_(-1)
        assert all(torch.equal(back[str(index)], sent[str(index)]) for index in range(1, 8))

    first_of(run_workers, task, **STRIPED)


def test_an_argument_may_change_once_the_call_is_over(run_workers: RunWorkers) -> None:
    def task(_: Worker) -> None:
        open_stripes()
        tensor = torch.empty(4 * MIB)
        for value in range(10):
            tensor.fill_(value)
            assert rpc.rpc_sync("worker1", total, args=(tensor,)) == value * 4 * MIB

    first_of(run_workers, task, **STRIPED)


def test_stripes_multiply_what_one_connection_gets(run_workers: RunWorkers) -> None:
    """Each connection is limited to 20 MB/s, so one takes 0.8 s for 16 MB."""

    def task(_: Worker) -> float:
        open_stripes()
        for limited in (
            limit_connections(20 * MIB),
            rpc.rpc_sync("worker1", limit_connections, args=(20 * MIB,)),
        ):
            assert limited == 5
        tensor = torch.ones(4 * MIB)
        begin = time.perf_counter()
        assert rpc.rpc_sync("worker1", total, args=(tensor,)) == 4 * MIB
        return time.perf_counter() - begin

    assert first_of(run_workers, task, **STRIPED) < 0.8 / 2


def test_small_calls_do_not_wait_for_large_transfers(run_workers: RunWorkers) -> None:
    """These take half a second each way."""

    def task(_: Worker) -> float:
        open_stripes()
        limit_connections(20 * MIB)
        rpc.rpc_sync("worker1", limit_connections, args=(20 * MIB,))
        large = [rpc.rpc_async("worker1", echo, args=(torch.ones(5 * MIB),)) for _ in range(2)]
        times: list[float] = []
        while not all(future.done() for future in large) or len(times) < 20:
            begin = time.perf_counter()
            rpc.rpc_sync("worker1", echo, args=(1,))
            times.append(time.perf_counter() - begin)
        return sorted(times)[len(times) // 2]

    assert first_of(run_workers, task, **STRIPED) < 0.02


# ---- settings


@pytest.mark.parametrize(("mine", "other", "used"), [(4, 2, 2), (2, 3, 2), (4, 1, 0), (1, 4, 0)], ids=str)
@pytest.mark.parametrize("asks", [0, 1], ids=["who connects", "who is connected to"])
def test_two_workers_use_the_smaller_number(
    run_workers: RunWorkers, mine: int, other: int, used: int, asks: int
) -> None:
    """Worker 0 connects; either may be the first to send something large."""
    workers = run_workers.start(
        [functools.partial(follow, stripes=mine), functools.partial(follow, stripes=other)]
    )
    workers.wait_for("ready")
    assert ask(workers[0], send_small)
    assert ask(workers[asks], send_large, f"worker{1 - asks}", used)
    assert ask(workers[1 - asks], send_large, f"worker{asks}", used)
    dismiss(workers)


def follow(worker: Worker, stripes: int) -> None:
    follow_orders(worker, **ACROSS, tcp_stripes=stripes)


def send_small() -> bool:
    return bool(rpc.rpc_sync("worker1", echo, args=(1,)) == 1)


def send_large(name: str, used: int) -> bool:
    if used:
        open_stripes(name, used)
    return exchange(name) and count_stripes(name) == used


def test_messages_over_the_receivers_limit_are_errors_of_their_calls(run_workers: RunWorkers) -> None:
    def task(_: Worker) -> None:
        open_stripes()
        with pytest.raises(SerializationError, match="to worker 'worker1' is over"):
            rpc.rpc_sync("worker1", total, args=(torch.ones(3 * MIB),))
        futures = [rpc.rpc_async("worker1", total, args=(torch.ones(2 * MIB),)) for _ in range(20)]
        assert [future.wait() for future in futures] == [2 * MIB] * 20

    first_of(run_workers, task, **STRIPED, max_message_bytes=10 * MIB)


# ---- the end

waiting: list[rpc.Future[Any]] = []


def begin_to_send(count: int) -> None:
    tensor = torch.ones(16 * MIB)
    waiting.extend(rpc.rpc_async("worker1", total, args=(tensor,)) for _ in range(count))


def all_are_lost(why: str) -> int:
    for future in waiting:
        with pytest.raises(WorkerLostError, match=f"'worker1'.*{why}"):
            future.wait()
    return len(waiting)


def small_call(to: str) -> int:
    return int(rpc.rpc_sync(to, torch.add, args=(1, 0)))


def descriptors() -> int:
    """Sockets that are open here."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


def has_only(count: int) -> bool:
    until(lambda: descriptors() == count)
    return True


def test_a_peer_that_dies_in_the_middle_of_a_transfer(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 3, **STRIPED, send_queue_bytes=1024 * MIB)
    assert ask(workers[0], small_call, "worker2") == 1
    before = ask(workers[0], descriptors)
    assert ask(workers[0], open_stripes)
    assert ask(workers[0], descriptors) == before + 5
    workers[1].stop()
    ask(workers[0], begin_to_send, 3)
    workers[1].kill()
    assert ask(workers[0], all_are_lost, "") == 3
    assert ask(workers[0], small_call, "worker2") == 1
    assert ask(workers[0], has_only, before)
    dismiss(workers)


def test_a_sender_that_dies_in_the_middle_of_a_transfer(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 3, **STRIPED, send_queue_bytes=1024 * MIB)
    assert ask(workers[1], small_call, "worker2") == 1
    before = ask(workers[1], descriptors)
    assert ask(workers[0], open_stripes)
    workers[1].stop()
    ask(workers[0], begin_to_send, 3)
    workers[1].resume()
    workers[0].kill()
    assert ask(workers[1], has_only, before)
    assert ask(workers[1], small_call, "worker2") == 1
    dismiss(workers)


def break_stripe(name: str) -> None:
    stripes_to(name)[2].shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("breaker", [0, 1], ids=["at its sender", "at its receiver"])
def test_the_end_of_a_stripe_is_that_of_the_connection(run_workers: RunWorkers, breaker: int) -> None:
    workers = start_followers(run_workers, 3, **STRIPED, send_queue_bytes=1024 * MIB)
    assert ask(workers[0], open_stripes)
    assert ask(workers[0], slow_down)
    ask(workers[0], begin_to_send, 3)
    ask(workers[breaker], break_stripe, f"worker{1 - breaker}")
    assert ask(workers[0], all_are_lost, "") == 3
    log = workers[0].log.read_text() + workers[1].log.read_text()
    assert "a stripe of its connection" in log
    assert ask(workers[0], small_call, "worker2") == 1
    assert ask(workers[1], small_call, "worker2") == 1
    dismiss(workers)


def slow_down() -> bool:
    return limit_connections(10 * MIB) > 0


def join(worker: Worker) -> None:
    options = AgentOptions(init_method=worker.init_method, **STRIPED)
    rpc.init_rpc(worker.name, rank=worker.rank, world_size=2, rpc_backend_options=options)


def big_answer() -> torch.Tensor:
    report("answering")
    return torch.ones(8 * MIB)


def fetch(worker: Worker) -> float:
    join(worker)
    open_stripes()
    assert rpc.rpc_sync("worker1", slow_down)
    fetched = total(rpc.rpc_async("worker1", big_answer).wait())
    rpc.shutdown(graceful=False)
    return fetched


def answer_and_leave(worker: Worker) -> None:
    join(worker)
    worker.wait_for("leave")
    until(lambda: not current_agent().under_way())
    rpc.shutdown(graceful=False)


def test_what_was_answered_before_leaving_arrives(run_workers: RunWorkers) -> None:
    """The answer takes most of a second over the stripes, the goodbye none on the connection."""
    workers = run_workers.start([fetch, answer_and_leave])
    workers[1].wait_for("answering")
    workers[1].tell("leave")
    assert workers.results() == [8 * MIB, None]


def test_shutdown_leaves_neither_sockets_nor_threads(run_workers: RunWorkers) -> None:
    def task(worker: Worker) -> None:
        before, threads = descriptors(), threading.active_count()
        with worker.group(**STRIPED):
            if worker.rank == 0:
                open_stripes()
                assert exchange()
        assert descriptors() <= before
        until(lambda: threading.active_count() <= threads)

    run_workers(task, 2)


def test_a_forked_child_lets_go_of_stripes(run_workers: RunWorkers) -> None:
    """Else the parent's peers would not notice its death as long as the child lives."""

    def task(_: Worker) -> None:
        open_stripes()
        inodes = {os.fstat(sock.fileno()).st_ino for sock in stripes_to("worker1")}
        child = os.fork()
        if not child:
            open_here = set()
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    open_here.add(os.fstat(int(name)).st_ino)
            os._exit(1 if inodes & open_here else 0)
        assert os.waitpid(child, 0)[1] == 0
        assert exchange()

    first_of(run_workers, task, **STRIPED)


# ---- peers that do not play by the rules


def strange_stripes(_: Worker) -> str:
    at: Target = rpc.rpc_sync("worker1", target)
    for header in STRANGE:
        with Hostile(at, "tcp") as peer:
            peer.say(frame_of_stripe(header))
            assert peer.is_hung_up()
    open_stripes()
    assert exchange()
    with Hostile(at, "tcp") as peer:
        peer.say(frame_of_stripe({"token": bytes(16), "number": 0}))
        assert peer.is_hung_up()
    assert exchange()
    return str(rpc.rpc_sync("worker1", my_name))


def frame_of_stripe(header: dict[str, Any]) -> bytes:
    return PREAMBLE + frame(Kind.STRIPE, header, call_id=0)


STRANGE: tuple[dict[str, Any], ...] = (
    {},
    {"token": "no bytes", "number": 0},
    {"token": bytes(16), "number": "no number"},
    {"token": bytes(16), "number": 0},
    {"token": b"", "number": 0},
)


def test_a_stripe_with_the_wrong_token_is_refused_and_the_log_says_why(run_workers: RunWorkers) -> None:
    workers = run_workers.start([in_group(strange_stripes, **STRIPED), functools.partial(serve, **STRIPED)])
    assert workers.results() == ["worker1", None]
    lines = [line for line in workers[1].log.read_text().splitlines() if line.startswith("refused")]
    assert len(lines) == len(STRANGE) + 1
    assert all("127.0.0.1" in line for line in lines)
    assert [("malformed stripe" in line) for line in lines] == [True] * 3 + [False] * 3
    assert all("a stripe that belongs to no connection, or comes too late" in line for line in lines[3:])


def send_bad_chunk(name: str) -> None:
    """Write to a stripe what no worker would."""
    stripes_to(name)[0].sendall(plan._HEADER.pack(1 << 40, 0, 1))


def test_a_malformed_chunk_closes_the_connection_and_the_log_says_why(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 3, **STRIPED)
    assert ask(workers[0], open_stripes)
    ask(workers[0], send_bad_chunk, "worker1")
    assert ask(workers[0], waits_until_lost, "worker1")
    assert ask(workers[1], waits_until_lost, "worker0")
    assert (
        "it sent a malformed message over a stripe: a chunk of message 1099511627776"
        in workers[1].log.read_text()
    )
    assert ask(workers[1], small_call, "worker2") == 1
    dismiss(workers)


def waits_until_lost(name: str) -> bool:
    peer = next(each for each in current_agent()._peers.values() if each.name == name)
    until(lambda: peer.lost)
    return True

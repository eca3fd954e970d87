"""What the interpreter allows between hosts: ``python -m benchmarks.plain_sockets`` measures a broadcast of
64 MB to one other rank beside two plain processes that move as much over blocking sockets.

The plain ones have a thread for each connection, which calls ``sendall`` from the tensor's memory, or
``recv_into`` with ``MSG_WAITALL`` into it, and nothing else: no protocol and no errors. They take turns with
farcall and gloo in the same processes, each on a host of its own (``network.py``).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.network import INTERFACE, Hosts, run_on_hosts
from benchmarks.workload import MIB

__all__ = ["main"]

_BYTES: Final = 64 * MIB
_CONNECTIONS: Final = 2
_WARM_UP: Final = 3
_ROUNDS: Final = 9

Operation = Callable[[], object]


def _connect(rank: int, address: str) -> list[socket.socket]:
    """Connections between rank 0, which has that address, and rank 1."""
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        with socket.create_server((address, 0)) as listener:
            port[0] = listener.getsockname()[1]
            dist.broadcast(port, 0)
            connections = [listener.accept()[0] for _ in range(_CONNECTIONS)]
    else:
        dist.broadcast(port, 0)
        connections = [socket.create_connection((address, int(port))) for _ in range(_CONNECTIONS)]
    for each in connections:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connections


def _receive(connection: socket.socket, view: memoryview) -> None:
    while view:
        view = view[connection.recv_into(view, 0, socket.MSG_WAITALL) :]


def _copy_plainly(rank: int, connections: list[socket.socket], memory: memoryview) -> None:
    """Rank 1's memory becomes rank 0's, and rank 0 waits until it has."""
    share = len(memory) // len(connections)
    parts = [memory[place * share : (place + 1) * share] for place in range(len(connections))]
    move: Callable[[socket.socket, memoryview], object] = socket.socket.sendall if rank == 0 else _receive
    threads = [threading.Thread(target=move, args=each) for each in zip(connections, parts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if rank == 0:
        connections[0].recv(1)
    else:
        connections[0].sendall(b".")


def _work(rank: int, hosts: Hosts, store: str) -> None:
    import rpc
    import spmd  # noqa: F401  # registers the backend

    address = hosts.enter(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    options: Any = rpc.AgentOptions(shared_memory_bytes=0, transports=["tcp"], listen=address)
    dist.init_process_group(
        "farcall", init_method=f"file://{store}", rank=rank, world_size=2, pg_options=options
    )
    gloo = dist.new_group(backend="gloo")
    tensor = torch.zeros(_BYTES // 4)
    connections = _connect(rank, "10.0.0.1")
    memory = tensor.numpy().data.cast("B")
    operations: dict[str, Operation] = {
        "farcall": partial(dist.broadcast, tensor, 0),
        "gloo": partial(dist.broadcast, tensor, 0, group=gloo),
        "plain, 1 connection": partial(_copy_plainly, rank, connections[:1], memory),
        "plain, 2 connections": partial(_copy_plainly, rank, connections, memory),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in operations}
    for round_ in range(_WARM_UP + _ROUNDS):
        for name, operation in operations.items():
            dist.barrier()
            begin, processor = time.perf_counter(), time.process_time()
            operation()
            dist.barrier()
            if round_ >= _WARM_UP:
                taken[name].append((time.perf_counter() - begin, time.process_time() - processor))
    for name, each in taken.items():
        processors = torch.tensor(statistics.median(processor for _, processor in each))
        dist.all_reduce(processors)
        if rank == 0:
            seconds = statistics.median(seconds for seconds, _ in each)
            print(f"{name}: {1e3 * seconds:.1f} ms, {1e3 * float(processors):.1f} ms of the processors")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Measure and print; returns the exit status."""
    return run_on_hosts(_work)


if __name__ == "__main__":
    sys.exit(main())

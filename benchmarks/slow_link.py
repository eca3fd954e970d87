"""A link of a given rate and delay between two hosts of ``network.py``, and what farcall makes of it:
``python -m benchmarks.slow_link``.

Two TUN devices, one on each host, and a thread for each direction that carries packets from one to the other.
A packet waits until those before it are through at the rate of the link, then for the delay. When more is
queued than the link carries in its buffer's time, packets are dropped.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import fcntl
import multiprocessing
import queue
import statistics
import struct
import subprocess
import sys
import threading
import time
from typing import Final

import torch

import rpc
from benchmarks.calls import nothing
from benchmarks.network import INTERFACE, Hosts, run_on_hosts
from benchmarks.transfers import swallow
from benchmarks.workload import MIB

__all__ = ["SlowLink", "main"]

_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_WITHOUT_HEADERS: Final = 0x1001
_MTU: Final = 16_000
"""Bytes in a packet, so that an interpreter can carry them fast enough."""
_BUFFER_SECONDS: Final = 0.02
_TENSOR_BYTES: Final = 64 * MIB
_REPEATS: Final = 7
_CALLS: Final = 100


class SlowLink:
    """Joins the hosts of two processes; as ``link`` of ``Hosts``. It is gone with the process that calls it.

    Args:
        rate: bytes that it carries in a second, each way.
        delay: seconds that it takes, one way.
    """

    def __init__(self, rate: float, delay: float) -> None:
        self._rate, self._delay = rate, delay

    def __call__(self, one: int, other: int) -> None:
        """Called on the host of ``one``. A process of its own carries the packets."""
        context = multiprocessing.get_context("fork")
        devices = [self._device(f"link{place}", process) for place, process in enumerate((one, other))]
        carrier = context.Process(target=self._carry_both_ways, args=devices, daemon=True)
        carrier.start()
        for device in devices:
            os.close(device)

    def _device(self, name: str, process: int) -> int:
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN_WITHOUT_HEADERS))
        for change in (
            ("mtu", str(_MTU), "txqueuelen", "1000"),
            ("netns", str(process), "name", INTERFACE) if process != os.getpid() else ("name", INTERFACE),
        ):
            subprocess.run(["ip", "link", "set", name, *change], check=True, capture_output=True)
        return device

    def _carry_both_ways(self, one: int, other: int) -> None:
        for source, target in ((one, other), (other, one)):
            on_their_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threading.Thread(target=self._take, args=(source, on_their_way), daemon=True).start()
            threading.Thread(target=_bring, args=(target, on_their_way), daemon=True).start()
        threading.Event().wait()

    def _take(self, source: int, on_their_way: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        through = 0.0
        while True:
            packet = os.read(source, 65_536)
            now = time.monotonic()
            if through < now + _BUFFER_SECONDS:
                through = max(through, now) + len(packet) / self._rate
                on_their_way.put((through + self._delay, packet))


def _bring(target: int, on_their_way: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    while True:
        due, packet = on_their_way.get()
        early = due - time.monotonic()
        if early > 0:
            time.sleep(early)
        with contextlib.suppress(OSError):  # the device is not up yet
            os.write(target, packet)


def _milliseconds_of_calls(count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        rpc.rpc_sync("worker1", nothing)
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def _measure(rate: float, delay: float) -> None:
    tensor = torch.ones(_TENSOR_BYTES // 4)

    def send() -> None:
        rpc.rpc_sync("worker1", swallow, args=(tensor,))

    for _ in range(2):
        send()
    idle = statistics.median(_milliseconds_of_calls(20))
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        send()
        times.append(time.perf_counter() - begin)
    stop = threading.Event()

    def keep_sending() -> None:
        while not stop.is_set():
            send()

    sender = threading.Thread(target=keep_sending)
    sender.start()
    beside = _milliseconds_of_calls(_CALLS)
    stop.set()
    sender.join()
    seconds = statistics.median(times)
    print(f"{rate * 8 / 1e9:g} Gbit/s, {2e3 * delay:g} ms there and back")
    print(
        f"64 MB to a call: {1e3 * seconds:.0f} ms, {100 * _TENSOR_BYTES / rate / seconds:.0f} % of the line"
    )
    late = statistics.quantiles(beside, n=100)[-1]
    print(
        f"null call: idle {idle:.1f} ms; beside 64 MB {statistics.median(beside):.1f} ms, p99 {late:.1f} ms"
    )


def _work(rank: int, hosts: Hosts, store: str, rate: float, delay: float) -> None:
    listen = hosts.enter(rank)
    options = rpc.AgentOptions(
        init_method=f"file://{store}", listen=listen, transports=["tcp"], shared_memory_bytes=0
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        _measure(rate, delay)
    rpc.shutdown()


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_link")
    parser.add_argument("--gigabits", type=float, default=1.0, metavar="N", help="per second; default 1")
    parser.add_argument("--delay", type=float, default=20.0, metavar="MS", help="there and back; default 20")
    arguments = parser.parse_args(argv)
    rate, delay = arguments.gigabits * 1e9 / 8, arguments.delay / 2e3
    return run_on_hosts(_work, rate, delay, link=SlowLink(rate, delay))


if __name__ == "__main__":
    sys.exit(main())

"""A weight store on hosts of their own: network namespaces, whose links have a given rate.

::

    python -m benchmarks.weights_hosts                                  # two hosts, 100 Mbit/s
    python -m benchmarks.weights_hosts --hosts 5 --megabits 1000 --megabytes 128

The first host publishes versions of a bfloat16 model: ones in which every element has changed, and ones in
which 2 % have. All others get each. Printed are the times from ``put``'s return until the last host has the
version, and the bytes that the first host's interface sent meanwhile, as multiples of the model's size.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Final

import torch

import rpc
from benchmarks.network import INTERFACE, Hosts, run_on_hosts
from farcall import weights

_TENSORS: Final = 8
_CHANGED: Final = 0.02


def _limit(megabits: float) -> None:
    """Have this host's interface send no faster."""
    rate = ("rate", f"{megabits:g}mbit", "burst", "256kb", "latency", "50ms")
    subprocess.run(["tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *rate], check=True)


def _change(state: dict[str, torch.Tensor], share: float) -> None:
    for value in state.values():
        chosen = torch.rand(len(value)) < share
        value[chosen] = torch.randn(int(chosen.sum()), dtype=torch.float32).to(value.dtype)


def _sent_bytes() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (columns,) = (line.split(":")[1].split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
    return int(columns[8])


def _work(
    rank: int, hosts: Hosts, path: str, size: int, megabits: float, megabytes: float, rounds: int
) -> None:
    warnings.filterwarnings("ignore")
    listen = hosts.enter(rank)
    _limit(megabits)
    options = rpc.AgentOptions(init_method=f"file://{path}", listen=listen, transports=["tcp"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    store = weights.Store("policy", on="worker0", keep=2)
    state = {
        f"w{i}": torch.zeros(int(megabytes * 1e6 / 2 / _TENSORS), dtype=torch.bfloat16)
        for i in range(_TENSORS)
    }
    model = sum(value.nbytes for value in state.values())
    figures: dict[float, list[tuple[float, float]]] = {1.0: [], _CHANGED: []}
    for number in range(2 * rounds):
        share = 1.0 if number % 2 == 0 else _CHANGED
        if rank == 0:
            _change(state, share)
            store.put(number, state)
        sent = _sent_bytes() if rank == 0 else 0
        rpc.barrier()
        began = time.perf_counter()
        if rank:
            store.get(state, version=number)
        rpc.barrier()
        if rank == 0:
            seconds = time.perf_counter() - began
            figures[share].append((seconds, (_sent_bytes() - sent) / model))
    if rank == 0:
        print(f"{megabytes:g} MB from one host to {size - 1}, links of {megabits:g} Mbit/s")
        for share, measured in figures.items():
            took, copies = (statistics.median(column) for column in zip(*measured, strict=True))
            print(f"{share:4.0%} changed: {1e3 * took:8.1f} ms, sent {copies:.3f} x the model")
    rpc.shutdown()


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights_hosts", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (default 2)")
    parser.add_argument("--megabits", type=float, default=100, help="rate of each link (default 100)")
    parser.add_argument("--megabytes", type=float, default=16, help="size of the model (default 16)")
    parser.add_argument("--rounds", type=int, default=3, help="of both kinds of versions (default 3)")
    given = parser.parse_args(argv)
    work = given.hosts, given.megabits, given.megabytes, given.rounds
    return run_on_hosts(_work, *work, size=given.hosts)


if __name__ == "__main__":
    sys.exit(main())

"""One-sided transfers between two processes of this host: farcall beside NIXL, whose UCX goes over TCP.

::

    python -m benchmarks.one_sided                # PyTorch 2.15 or newer
    pip install nixl-cu12                         # for the comparison; needs no GPU

Medians of writes and reads of registered CPU memory, in milliseconds. ``UCX_TLS`` chooses what UCX may use;
default: ``tcp,self``, as between hosts without RDMA. farcall uses shared memory between processes of a host.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import torch

_SIZES = (1 << 10, 1 << 20, 64 << 20)
_ROUNDS = 25
_WARM_UP = 8


def _own(kind: str, size: int, link: Connection) -> None:
    """The peer: registers memory, and does nothing more."""
    transport, memory = _connected(kind, torch.zeros(size, dtype=torch.uint8), link)
    link.send(memory.to_remote_buffer().serialize())
    link.recv()
    transport.close()


def _connected(kind: str, tensor: torch.Tensor, link: Any) -> tuple[Any, Any]:
    from torch.distributed._transport import new_transport  # type: ignore[import-not-found,unused-ignore]

    torch.set_num_threads(1)
    transport = new_transport(kind, "cpu")
    link.send(transport.bind())
    transport.connect(link.recv())
    return transport, transport.register_memory(tensor)


def _median(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[_WARM_UP:])


def _measure(kind: str, size: int) -> tuple[float, float]:
    """Medians of writes and of reads, in milliseconds."""
    ours, theirs = multiprocessing.Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=_own, args=(kind, size, theirs))
    peer.start()
    transport, memory = _connected(kind, torch.ones(size, dtype=torch.uint8), ours)
    remote = type(memory.to_remote_buffer()).deserialize(ours.recv())
    writes = _median(lambda: transport.write(memory.to_view(), remote))
    reads = _median(lambda: transport.read(memory.to_mutable_view(), remote))
    ours.send(None)
    peer.join()
    transport.close()
    return writes, reads


def main() -> int:
    """Print a table; returns the exit status."""
    if find_spec("torch.distributed._transport") is None:
        print(f"PyTorch {torch.__version__} has no one-sided transfers; 2.15 is the first that has")
        return 1
    os.environ.setdefault("UCX_TLS", "tcp,self")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    kinds = ["farcall"] + (["nixl"] if find_spec("nixl") else [])
    print(f"PyTorch {torch.__version__}, medians of {_ROUNDS - _WARM_UP}, ms")
    print(f"{'KiB':>6} {'':8} {'write':>8} {'read':>8}")
    for size in _SIZES:
        for kind in kinds:
            writes, reads = _measure(kind, size)
            print(f"{size >> 10:6} {kind:8} {writes:8.3f} {reads:8.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The weight store beside bare copies by the same processes, and beside ``torch.distributed.checkpoint``.

::

    python -m benchmarks.weights                 # 256 MB, two writers with halves, three readers with thirds
    python -m benchmarks.weights --megabytes 64 --rounds 20

Writers have halves by rows, readers thirds by columns. Each round goes through all sides in turn: ``copies``
has the processes copy their blocks to and from one memory that all have mapped, which is the least that can
be done; ``checkpoint`` saves to /dev/shm and loads from there. Medians in milliseconds, and their ratios to
those of the copies. The first rounds, in which memory is allocated, do not count.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import mmap
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import rpc
from farcall import weights

_WRITERS: Final = 2
_READERS: Final = 3
_ROWS: Final = 1 << 11
_TENSORS: Final = 16
_WARM_UP: Final = 2
_CHECKPOINT_EVERY: Final = 4
"""A checkpoint takes much longer, so it is measured in some rounds only."""

_SIDES: Final = ("copies", "store", "checkpoint")


class _Blocks:
    """The blocks of one process, and a place for all tensors that all processes share."""

    def __init__(self, rank: int, shared: mmap.mmap, columns: int) -> None:
        self.is_writer = rank < _WRITERS
        self.shape = (_ROWS, columns)
        self.dim = 0 if self.is_writer else 1
        count, index = (_WRITERS, rank) if self.is_writer else (_READERS, rank - _WRITERS)
        self.part = index, count
        length = -(-self.shape[self.dim] // count)
        begin = min(index * length, self.shape[self.dim])
        self.offset = (begin, 0) if self.is_writer else (0, begin)
        size = min(length, self.shape[self.dim] - begin)
        self.sizes = (size, columns) if self.is_writer else (_ROWS, size)
        self.local = [torch.full(self.sizes, float(rank + 1), dtype=torch.bfloat16) for _ in range(_TENSORS)]
        whole = torch.frombuffer(shared, dtype=torch.bfloat16).view(_TENSORS, *self.shape)
        self._places = [
            each.narrow(0, self.offset[0], self.sizes[0]).narrow(1, self.offset[1], self.sizes[1])
            for each in whole
        ]

    def state(self) -> dict[str, weights.Block]:
        return {f"w{i}": weights.Block(local, self.offset, self.shape) for i, local in enumerate(self.local)}

    def copy(self) -> None:
        for place, local in zip(self._places, self.local, strict=True):
            place.copy_(local) if self.is_writer else local.copy_(place)

    def sharded(self, mesh: DeviceMesh) -> dict[str, DTensor]:
        shape, stride = torch.Size(self.shape), (self.shape[1], 1)
        return {
            f"w{i}": DTensor.from_local(
                local, mesh, [Shard(self.dim)], run_check=False, shape=shape, stride=stride
            )
            for i, local in enumerate(self.local)
        }


def _work(
    rank: int, folder: str, shared: mmap.mmap, columns: int, rounds: int, barrier: Any, results: Any
) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    size = _WRITERS + _READERS
    options = rpc.AgentOptions(init_method=f"file://{folder}/rpc")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    dist.init_process_group("gloo", init_method=f"file://{folder}/c10d", rank=rank, world_size=size)
    groups = dist.new_group([*range(_WRITERS)]), dist.new_group([*range(_WRITERS, size)])
    blocks = _Blocks(rank, shared, columns)
    group = groups[0 if blocks.is_writer else 1]
    sharded = blocks.sharded(DeviceMesh.from_group(group, "cpu"))
    store = weights.Store("policy", on="worker0", keep=2)
    path = tempfile.mkdtemp(dir="/dev/shm") if not rank else None
    shared_path: list[Any] = [path]
    dist.broadcast_object_list(shared_path)
    path = shared_path[0]

    def put(number: int, side: str) -> None:
        if side == "copies":
            blocks.copy()
        elif side == "store":
            store.put(number, blocks.state(), part=blocks.part)
        else:
            save(sharded, checkpoint_id=f"{path}/{number % 2}", process_group=group)

    def get(number: int, side: str) -> None:
        if side == "copies":
            blocks.copy()
        elif side == "store":
            store.get(blocks.state(), version=number)
        else:
            load(sharded, checkpoint_id=f"{path}/{number % 2}", process_group=group)

    def timed(act: Callable[[int, str], None], number: int, side: str, *, acts: bool) -> float:
        barrier.wait()
        began = time.perf_counter()
        if acts:
            act(number, side)
        barrier.wait()
        return 1e3 * (time.perf_counter() - began)

    for number in range(rounds):
        for side in _SIDES:
            if side == "checkpoint" and number % _CHECKPOINT_EVERY != _CHECKPOINT_EVERY - 1:
                continue
            took = (
                timed(put, number, side, acts=blocks.is_writer),
                timed(get, number, side, acts=not blocks.is_writer),
            )
            if not rank and number >= _WARM_UP:
                results.put((side, *took))
    if not rank:
        results.put(None)
        shutil.rmtree(path)
    dist.destroy_process_group()
    rpc.shutdown()


def main(argv: list[str] | None = None) -> int:
    """Print a table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="size of the model (default 256)")
    parser.add_argument("--rounds", type=int, default=12, help="of the copies and the store (default 12)")
    arguments = parser.parse_args(argv)
    columns = arguments.megabytes * 1_000_000 // (2 * _ROWS * _TENSORS)
    shared = mmap.mmap(-1, 2 * _ROWS * _TENSORS * columns)
    fork = multiprocessing.get_context("fork")
    size = _WRITERS + _READERS
    barrier, results = fork.Barrier(size), fork.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            fork.Process(
                target=_work,
                args=(rank, folder, shared, columns, arguments.rounds, barrier, results),
                daemon=True,
            )
            for rank in range(size)
        ]
        for each in processes:
            each.start()
        times: dict[str, list[tuple[float, float]]] = {side: [] for side in _SIDES}
        while (measured := results.get()) is not None:
            side, put, get = measured
            times[side].append((put, get))
        for each in processes:
            each.join()
    medians = {
        side: [statistics.median(column) for column in zip(*rows, strict=True)]
        for side, rows in times.items()
        if rows
    }
    print(f"{arguments.megabytes} MB, {_WRITERS} writers, {_READERS} readers; ms, and times the copies")
    for side, (put, get) in medians.items():
        bare_put, bare_get = medians["copies"]
        both = (put + get) / (bare_put + bare_get)
        columns_put = f"put {put:7.1f} ({put / bare_put:5.2f})"
        columns_get = f"get {get:7.1f} ({get / bare_get:5.2f})"
        print(f"{side:12} {columns_put}  {columns_get}  both {both:5.2f}")
    return max(abs(each.exitcode or 0) for each in processes)


if __name__ == "__main__":
    sys.exit(main())

"""The weight store beside Ray's object store, by the same actors of Ray; needs ``ray``.

::

    python -m benchmarks.weights_ray              # 256 MB, two writers with halves, three readers with thirds

Writers have halves by rows, readers thirds by columns, which they copy into tensors of their own. ``copies``
has the actors copy their blocks to and from one file in /dev/shm that all have mapped, ``tensors`` and
``arrays`` have them put their halves into Ray's object store as PyTorch's tensors or NumPy's arrays, and get
both. Each round goes through all sides in turn; medians in milliseconds, and their ratios to those of the
copies. All times include a task of each actor.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import mmap
import statistics
import sys
import tempfile
import time
from typing import Any, Final

import numpy as np
import ray
import torch

import rpc
from farcall import weights

_WRITERS: Final = 2
_READERS: Final = 3
_ROWS: Final = 1 << 11
_TENSORS: Final = 16
_WARM_UP: Final = 2
_SIDES: Final = ("copies", "store", "tensors", "arrays")


class _Worker:
    """The blocks of one actor: ``float16``, as NumPy has no ``bfloat16``."""

    def __init__(self, rank: int, folder: str, columns: int) -> None:
        torch.set_num_threads(1)
        self.is_writer = rank < _WRITERS
        self.shape = (_ROWS, columns)
        dim, index, count = (0, rank, _WRITERS) if self.is_writer else (1, rank - _WRITERS, _READERS)
        self.part = index, count
        extent = self.shape[dim]
        begin, end = extent * index // count, extent * (index + 1) // count
        self.offset = (begin, 0) if self.is_writer else (0, begin)
        self.block = (slice(begin, end), slice(None)) if self.is_writer else (slice(None), slice(begin, end))
        sizes = (end - begin, columns) if self.is_writer else (_ROWS, end - begin)
        self.local = [torch.full(sizes, float(rank + 1), dtype=torch.float16) for _ in range(_TENSORS)]
        with open(f"{folder}/memory", "r+b") as file:
            whole = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.float16)
        self.common = [each[self.block] for each in whole.view(_TENSORS, *self.shape)]
        options = rpc.AgentOptions(init_method=f"file://{folder}/rpc")
        size = _WRITERS + _READERS
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
        self.store = weights.Store("policy", on="worker0", keep=2)

    def state(self) -> dict[str, weights.Block]:
        return {f"w{i}": weights.Block(local, self.offset, self.shape) for i, local in enumerate(self.local)}

    def put(self, side: str, number: int) -> Any:
        """Put a half; returns what readers need."""
        if side == "copies":
            for common, local in zip(self.common, self.local, strict=True):
                common.copy_(local)
        elif side == "store":
            self.store.put(number, self.state(), part=self.part)
        elif side == "tensors":
            return [ray.put(self.local)]
        else:
            return [ray.put([each.numpy() for each in self.local])]
        return None

    def get(self, side: str, number: int, halves: list[Any]) -> None:
        """Get a third."""
        if side == "copies":
            for common, local in zip(self.common, self.local, strict=True):
                local.copy_(common)
        elif side == "store":
            self.store.get(self.state(), version=number)
        else:
            split = _ROWS // _WRITERS
            for rows, (reference,) in zip((slice(0, split), slice(split, _ROWS)), halves, strict=True):
                for value, local in zip(ray.get(reference), self.local, strict=True):
                    if side == "tensors":
                        local[rows].copy_(value[:, self.block[1]])
                    else:
                        np.copyto(local.numpy()[rows], value[:, self.block[1]])

    def has(self, value: float) -> bool:
        """Whether the rows of the first writer arrived."""
        return all(bool((each[0] == value).all()) for each in self.local)

    def clear(self) -> None:
        """Forget what was read."""
        for each in self.local:
            each.zero_()

    def leave(self) -> None:
        rpc.shutdown()


def main(argv: list[str] | None = None) -> int:
    """Print a table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights_ray", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="size of the model (default 256)")
    parser.add_argument("--rounds", type=int, default=12, help="of all sides (default 12)")
    given = parser.parse_args(argv)
    columns = given.megabytes * 1_000_000 // (2 * _ROWS * _TENSORS)
    size = _WRITERS + _READERS
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in _SIDES}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with open(f"{folder}/memory", "wb") as file:
            file.truncate(2 * _ROWS * _TENSORS * columns)
        ray.init(
            address="local",
            num_cpus=size,
            include_dashboard=False,
            logging_level="error",
            object_store_memory=8 * given.megabytes << 20,
        )
        actors: list[Any] = [
            ray.remote(_Worker).options(num_cpus=1).remote(rank, folder, columns) for rank in range(size)
        ]
        writers, readers = actors[:_WRITERS], actors[_WRITERS:]
        for number in range(given.rounds):
            for side in _SIDES:
                ray.get([each.clear.remote() for each in readers])
                began = time.perf_counter()
                halves = ray.get([each.put.remote(side, number) for each in writers])
                put = time.perf_counter()
                ray.get([each.get.remote(side, number, halves) for each in readers])
                got = time.perf_counter()
                if not all(ray.get([each.has.remote(1.0) for each in readers])):
                    raise RuntimeError(f"{side}: wrong values")
                if number >= _WARM_UP:
                    times[side].append((1e3 * (put - began), 1e3 * (got - put)))
        ray.get([each.leave.remote() for each in actors])
        ray.shutdown()
    print(f"{given.megabytes} MB, {_WRITERS} writers, {_READERS} readers; ms, and times the copies")
    medians = {
        side: [statistics.median(column) for column in zip(*rows, strict=True)]
        for side, rows in times.items()
    }
    copies = sum(medians["copies"])
    for side, (wrote, read) in medians.items():
        print(f"{side:8} put {wrote:7.1f}  get {read:7.1f}  both {(wrote + read) / copies:5.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The command ``python -m benchmarks.collectives``: the backend ``farcall`` beside gloo.

Both are process groups of the same processes. A line is measured in rounds: a batch on one, then one on the
other, so that what else the machine does meets both. The ratios are those of the medians: of the time, and of
the time of the processors of all ranks.

With ``--tcp`` each rank is on a host of its own (``network.py``), with ``--hosts`` there are fewer hosts than
ranks: both use TCP over the same links, and farcall shared memory within a host. Where there can be no such
hosts, both use loopback. With ``--busy`` other processes compute meanwhile; batches are longer then, since a
rank may wait tens of milliseconds for a core.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network import INTERFACE, Hosts, why_not
from benchmarks.others import busy_processes

__all__ = ["main"]

_BACKENDS: Final = ("farcall", "gloo")
_BATCH_SECONDS: Final = 0.1
_BUSY_BATCH_SECONDS: Final = 0.5
_ROUNDS: Final = 7
_LIMIT_SECONDS: Final = 600.0
"""Time in seconds after which processes that compute beside the ranks end by themselves."""

Operation = Callable[[], object]


@dataclass(frozen=True)
class Line:
    """What is measured.

    Attributes:
        name: of the line.
        make: given the process group, what is done once.
        bar: the ratio to gloo that it should not exceed.
        bar_between_hosts: the same with ``--tcp``.
    """

    name: str
    make: Callable[[Any], Operation]
    bar: float
    bar_between_hosts: float = 1.0


def _size(count: int) -> str:
    for unit, factor in (("MB", 1 << 20), ("KB", 1 << 10)):
        if count >= factor:
            return f"{count // factor} {unit}"
    return f"{count} B"


def _all_reduce(count: int) -> Callable[[Any], Operation]:
    def make(group: Any) -> Operation:
        tensor = torch.zeros(count // 4)
        return lambda: dist.all_reduce(tensor, group=group)

    return make


def _all_gather(count: int) -> Callable[[Any], Operation]:
    def make(group: Any) -> Operation:
        output = torch.zeros(count // 4)
        mine = torch.zeros(count // 4 // group.size())
        return lambda: dist.all_gather_into_tensor(output, mine, group=group)

    return make


def _reduce_scatter(count: int) -> Callable[[Any], Operation]:
    def make(group: Any) -> Operation:
        mine = torch.zeros(count // 4)
        output = torch.zeros(count // 4 // group.size())
        return lambda: dist.reduce_scatter_tensor(output, mine, group=group)

    return make


def _all_to_all(count: int) -> Callable[[Any], Operation]:
    def make(group: Any) -> Operation:
        mine, output = torch.zeros(count // 4), torch.zeros(count // 4)
        return lambda: dist.all_to_all_single(output, mine, group=group)

    return make


def _broadcast(count: int) -> Callable[[Any], Operation]:
    def make(group: Any) -> Operation:
        tensor = torch.zeros(count // 4)
        return lambda: dist.broadcast(tensor, 0, group=group)

    return make


def _training_step(group: Any) -> Operation:
    """A step of a model of 10 million parameters, whose gradients are exchanged."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(10):
        layers += [torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(16, 1024)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model(x).sum())
        optimizer.step()

    return step


_MIB: Final = 1 << 20
_BAR_OF_MORE_RANKS: Final = 0.9
"""The bar between hosts for more than two ranks, where that for two is below 1."""
_BUSY_BAR: Final = 0.9
"""The bar beside other processes."""

LINES: Final = (
    *(
        Line(f"all-reduce {_size(count)}", _all_reduce(count), bar, 0.8 if count >= 16 * _MIB else 1.0)
        for count, bar in (
            (8, 0.4),
            (4 << 10, 0.4),
            (64 << 10, 0.5),
            (_MIB, 0.5),
            (16 * _MIB, 0.35),
            (64 * _MIB, 0.35),
        )
    ),
    Line("all-gather 64 MB", _all_gather(64 * _MIB), 0.2),
    Line("reduce-scatter 64 MB", _reduce_scatter(64 * _MIB), 0.5),
    Line("all-to-all 64 MB", _all_to_all(64 * _MIB), 0.5, 0.8),
    Line("broadcast 64 MB", _broadcast(64 * _MIB), 0.5, 0.8),
    Line("DDP step, 10 M parameters", _training_step, 0.7, 0.95),
)


@dataclass(frozen=True)
class Taken:
    """The cost of an operation: seconds, and CPU seconds of all ranks."""

    seconds: float
    processor: float


def _batch(operation: Operation, count: int) -> Taken:
    """For each of ``count``, on this rank."""
    begin, processor = perf_counter(), process_time()
    for _ in range(count):
        operation()
    return Taken((perf_counter() - begin) / count, (process_time() - processor) / count)


def _measure(line: Line, groups: dict[str, Any], batch_seconds: float) -> dict[str, Taken]:
    """The medians of each backend, over batches of about that many seconds."""
    operations = {name: line.make(group) for name, group in groups.items()}
    counts = {}
    for name, operation in operations.items():
        operation()
        needed = torch.tensor(batch_seconds / max(1e-6, _batch(operation, 3).seconds))
        dist.broadcast(needed, 0)  # all ranks do the same
        counts[name] = max(1, min(2000, int(needed)))
    taken: dict[str, list[Taken]] = {name: [] for name in operations}
    for _ in range(_ROUNDS):
        for name, operation in operations.items():
            dist.barrier()
            taken[name].append(_batch(operation, counts[name]))
    medians = {}
    for name, each in taken.items():
        processor = torch.tensor(statistics.median(one.processor for one in each))
        dist.all_reduce(processor)
        medians[name] = Taken(statistics.median(one.seconds for one in each), float(processor))
    return medians


def _work(
    rank: int,
    size: int,
    store: str,
    names: list[str],
    results: Any,
    options: dict[str, Any],
    hosts: Hosts | None,
    batch_seconds: float,
) -> None:
    import rpc
    import spmd  # noqa: F401  # registers the backend

    if hosts is not None:
        options = options | {"listen": hosts.enter(rank)}
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of names that PyTorch has new ones for
    dist.init_process_group(
        "farcall",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        pg_options=rpc.AgentOptions(**options),
    )
    groups = {"farcall": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    for line in _selected(names):
        medians = _measure(line, groups, batch_seconds)
        if rank == 0:
            results.put((line.name, medians))
    dist.barrier()
    dist.destroy_process_group()


def _selected(names: list[str]) -> Iterator[Line]:
    for line in LINES:
        if not names or any(name in line.name for name in names):
            yield line


def _run(
    size: int, names: list[str], options: dict[str, Any], hosts_count: int, busy: int
) -> Iterator[tuple[Line, dict[str, Taken]]]:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    hosts = Hosts(context, size, hosts_count) if hosts_count else None
    batch_seconds = _BUSY_BATCH_SECONDS if busy else _BATCH_SECONDS
    with (
        tempfile.TemporaryDirectory(prefix="farcall-bench-") as folder,
        busy_processes(busy, _LIMIT_SECONDS),
    ):
        store = str(Path(folder) / "store")
        workers = [
            context.Process(
                target=_work,
                args=(rank, size, store, names, results, options, hosts, batch_seconds),
                daemon=True,
            )
            for rank in range(size)
        ]
        for worker in workers:
            worker.start()
        for line in _selected(names):
            while results.empty():
                workers[0].join(0.1)
                if any(worker.exitcode for worker in workers):
                    raise SystemExit(f"a rank has failed in {line.name}")
            yield line, results.get()[1]
        for worker in workers:
            worker.join()


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives", description="Measures the backend farcall beside gloo."
    )
    parser.add_argument("lines", nargs="*", help="parts of names of lines; default: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="default 2 and 4")
    parser.add_argument("--tcp", action="store_true", help="between hosts: no shared memory, TCP only")
    parser.add_argument("--hosts", type=int, metavar="N", help="with --tcp: number of hosts; default: ranks")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="beside N processes that compute")
    arguments = parser.parse_args(argv)
    options: dict[str, Any] = {}
    if arguments.tcp:
        options = (
            {"transports": ["tcp"]} if arguments.hosts else {"shared_memory_bytes": 0, "transports": ["tcp"]}
        )
    console = Console(highlight=False)
    problem = why_not() if arguments.tcp else None
    if problem is not None:
        console.print(f"[dim]over loopback, since there are no network namespaces: {problem}[/dim]")
    on_hosts = arguments.tcp and problem is None
    table = Table("", "ranks", "farcall", "gloo", "ratio", "processor", "bar")
    for size in arguments.ranks:
        hosts = (arguments.hosts or size) if on_hosts else 0
        for line, medians in _run(size, arguments.lines, options, hosts, arguments.busy):
            ours, gloo = (medians[name] for name in _BACKENDS)
            ratio, processor = ours.seconds / gloo.seconds, ours.processor / gloo.processor
            bar = line.bar_between_hosts if arguments.tcp else line.bar
            if arguments.tcp and size > 2 and bar < 1:
                bar = _BAR_OF_MORE_RANKS
            if arguments.busy:
                bar = _BUSY_BAR
            mark = f"{bar:g} x{'' if ratio <= bar else ' missed'}"
            table.add_row(
                line.name,
                str(size),
                _time(ours.seconds),
                _time(gloo.seconds),
                f"{ratio:.2f} x",
                f"{processor:.2f} x",
                mark,
            )
            console.print(f"[dim]{line.name}, {size} ranks: {ratio:.2f} x, processor {processor:.2f} x[/dim]")
    console.print(table)
    return 0


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


if __name__ == "__main__":
    sys.exit(main())

"""The costs of elastic jobs: ``python -m benchmarks.elastic``.

::

    python -m benchmarks.elastic steps       # beside DistributedDataParallel on the backend farcall
    python -m benchmarks.elastic newcomer    # what the others wait while one gets a state of 1 GB
    python -m benchmarks.elastic spare       # from a kill until as many members commit steps again

``steps`` measures both sides in the same two processes, in turns: the medians over rounds of the time and of
the processors' time of a step. ``newcomer`` compares the longest pause between two steps, less a step, with
the time in which one process copies as many bytes to new memory. ``spare`` runs the launcher.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import itertools
import json
import multiprocessing
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rpc
from farcall import elastic

__all__ = ["main"]

_BATCH: Final = 64
_ROUNDS: Final = 11
_ROUND_SECONDS: Final = 0.3
_MODELS: Final = {"small": (64, 1), "middle": (512, 4)}
"""Widths and numbers of layers."""
_STEPS_BAR: Final = 1.10, 1.05
_NEWCOMER_BAR: Final = 1.5
_SPARE_BAR: Final = 1.0


def _join_group(name: str, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = (Path(folder) / "meeting").as_uri()
    rpc.init_rpc(name, rpc_backend_options=rpc.AgentOptions(init_method=meeting, dynamic=True))


def _processes(program: Callable[..., object], calls: list[tuple[Any, ...]]) -> int:
    """Run a program in processes of its own; returns how many have failed."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=program, args=args) for args in calls]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    return sum(each.exitcode != 0 for each in processes)


# ---- steps


def _model(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))


def _measured(group: Any, count: int, step: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and seconds of the processors of both processes, of a step."""
    for _ in range(3):
        step()
    began, used = perf_counter(), process_time()
    for _ in range(count):
        step()
    took = torch.tensor([perf_counter() - began, process_time() - used], dtype=torch.float64)
    dist.all_reduce(took, group=group)
    return float(took[0]) / 2 / count, float(took[1]) / count


def _run_steps(rank: int, folder: str, name: str) -> None:
    _join_group(f"worker{rank}", folder)
    dist.init_process_group("farcall", init_method=(Path(folder) / "c10d").as_uri(), rank=rank, world_size=2)
    _compare(name, rank)
    dist.destroy_process_group()
    rpc.shutdown()


def _compare(name: str, rank: int) -> None:
    width, layers = _MODELS[name]
    plain, member = _model(width, layers), _model(width, layers)
    wrapped = DistributedDataParallel(plain)
    plain_optimizer = torch.optim.SGD(plain.parameters(), 1e-3, momentum=0.9)
    optimizer = torch.optim.SGD(member.parameters(), 1e-3, momentum=0.9)
    x = torch.randn(_BATCH * 8, width)
    samples: Any = torch.utils.data.DistributedSampler(range(len(x)), 2, rank)  # type: ignore[arg-type]
    batches: Iterator[list[int]] = itertools.cycle(torch.utils.data.BatchSampler(samples, _BATCH // 2, True))

    def plain_step() -> None:
        plain_optimizer.zero_grad()
        wrapped(x[torch.tensor(next(batches))]).square().mean().backward()
        plain_optimizer.step()

    job = elastic.join(
        model=member, optimizer=optimizer, sampler=elastic.Sampler(len(x), _BATCH, seed=0), min_size=2
    )
    attempts = job.attempts()

    def elastic_step() -> None:
        attempt = next(attempts)
        with attempt:
            (member(x[attempt.indices]).square().sum() / width / attempt.batch_size).backward()
            optimizer.step()

    elapsed, _ = _measured(None, 20, plain_step)
    count = max(10, round(_ROUND_SECONDS / elapsed))
    agreed = torch.tensor([count])
    dist.broadcast(agreed, 0)
    found: dict[Callable[[], None], list[tuple[float, float]]] = {plain_step: [], elastic_step: []}
    for number in range(_ROUNDS):
        for step in list(found)[:: 1 if number % 2 else -1]:
            found[step].append(_measured(None, int(agreed), step))
    if rank == 0:
        sides = [[statistics.median(each) for each in zip(*found[step], strict=True)] for step in found]
        text = [f"{1e3 * elapsed:.2f} ms ({1e3 * used:.2f} ms of the processors)" for elapsed, used in sides]
        print(f"{name}: DistributedDataParallel {text[0]}, elastic {text[1]}")
        for what, one, other, bar in zip(("time", "processors"), *sides, _STEPS_BAR, strict=True):
            print(f"{name}: {other / one:.3f} x in {what} (at most {bar})")
    job.finish()
    elastic_step()
    next(attempts, None)


# ---- newcomer


class _Ballast(nn.Module):
    """Parameters that are not trained."""

    def __init__(self, size: int) -> None:
        super().__init__()
        parts = [torch.ones(16 << 20) for _ in range(size // (64 << 20))]
        self.parts = nn.ParameterList([nn.Parameter(each, requires_grad=False) for each in parts])


def _copying(tensors: list[torch.Tensor]) -> float:
    """Seconds in which tensors are copied to new memory of this process."""
    times = []
    for _ in range(3):
        began = perf_counter()
        copies = [each.clone() for each in tensors]
        times.append(perf_counter() - began)
        del copies
    return statistics.median(times)


def _run_newcomer(number: int, folder: str, size: int) -> None:
    _join_group(f"worker{number}", folder)
    model, ballast = _model(64, 1), _Ballast(size)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    if number == 1:
        copying = _copying(list(ballast.parts))
    if number == 2:  # when its own state is there, too
        while not (Path(folder) / "trains").exists():
            time.sleep(0.01)
    sampler = elastic.Sampler(512, _BATCH)
    job = elastic.join(model=model, optimizer=optimizer, ballast=ballast, sampler=sampler, min_size=2)
    times: list[float] = []
    after = 0
    for attempt in job.attempts():
        with attempt:
            model(torch.ones(len(attempt.indices), 64)).sum().backward()
            if after == 50:
                job.finish()
            optimizer.step()
        times.append(perf_counter())
        after += attempt.size == 3
        if len(times) == 200:
            (Path(folder) / "trains").touch()
    if number == 1:
        pauses = [after - before for before, after in itertools.pairwise(times[50:])]
        pause = max(pauses) - statistics.median(pauses)
        print(f"a state of {size >> 20} MB: the others wait {pause:.2f} s, a copy takes {copying:.2f} s")
        print(f"{pause / copying:.2f} x (at most {_NEWCOMER_BAR})")
    rpc.shutdown()


# ---- spare


def _run_member(folder: Path) -> None:
    """A program for the launcher."""
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{os.environ['RANK']}")
    model = _model(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    job = elastic.join(model=model, optimizer=optimizer, sampler=elastic.Sampler(512, _BATCH))
    seen = 0
    with open(folder / f"{os.getpid()}.log", "w", encoding="utf-8") as log:
        for attempt in job.attempts():
            with attempt:
                model(torch.ones(len(attempt.indices), 64)).sum().backward()
                if (folder / "stop").exists():
                    job.finish()
                optimizer.step()
            if attempt.committed and attempt.view != seen:
                seen = attempt.view
                log.write(json.dumps([time.monotonic(), seen, attempt.size]) + "\n")
                log.flush()
    rpc.shutdown()


def _commits(path: Path) -> list[tuple[float, int, int]]:
    """When the first step of each view was committed, the view, and its size."""
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(True) if line[-1] == "\n"
    ]


def _spare(kills: int, pause: float) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "farcall", "launch", "-n", "3", "--dynamic", "--restart", "1000"]
        command += ["--spares", "1", "-m", "benchmarks.elastic", "member", name]
        launcher = subprocess.Popen(command)
        took = []
        while not any(size == 3 for log in folder.glob("*.log") for _, _, size in _commits(log)):
            time.sleep(0.1)
        for number in range(kills):
            time.sleep(pause)  # until the next spare has imported everything
            living = [each for each in folder.glob("*.log") if Path(f"/proc/{each.stem}").exists()]
            victim, witness = living[number % 2 :][:2]
            before = _commits(witness)[-1][1]
            killed_at = time.monotonic()
            os.kill(int(victim.stem), signal.SIGKILL)
            while not (back := [at for at, view, size in _commits(witness) if view > before and size == 3]):
                time.sleep(0.05)
            took.append(back[0] - killed_at)
        (folder / "stop").touch()
        launcher.wait()
    print(f"back at full size after {', '.join(f'{each:.2f}' for each in took)} s (at most {_SPARE_BAR})")
    return launcher.returncode


def main() -> int:
    """Run what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser("python -m benchmarks.elastic", description=__doc__)
    parser.add_argument("what", choices=("steps", "newcomer", "spare", "member"))
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the newcomer's state")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--pause", type=float, default=12.0, help="seconds before each kill")
    options = parser.parse_args()
    if options.what == "member":
        _run_member(options.folder)
        return 0
    if options.what == "spare":
        return _spare(options.kills, options.pause)
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "newcomer":
            calls = [(number, folder, options.megabytes << 20) for number in range(3)]
            return _processes(_run_newcomer, calls)
        failed = 0
        for name in _MODELS:
            (Path(folder) / name).mkdir()
            failed += _processes(_run_steps, [(rank, f"{folder}/{name}", name) for rank in range(2)])
        return failed


if __name__ == "__main__":
    sys.exit(main())

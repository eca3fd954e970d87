"""The two sides of ``benchmarks.spmd``: a driver with its workers, and the ranks of programs written by hand.

Each is a set of processes that do what they are told over pipes, one side at a time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import multiprocessing

import rpc
import spmd
from benchmarks import spmd_counting as counting
from benchmarks.spmd_cases import Sizes, Step, by_hand, on_device
from spmd.engine.driver.current import engine
from spmd.engine.driver.logical_tensor import LogicalTensor, dispatch_with
from spmd.engine.driver.recorder import Recording
from spmd.engine.driver.start import worker_names

__all__ = ["BACKENDS", "ByHand", "OnDevice", "Side"]

BACKENDS: Final = ("farcall", "gloo")
_PATIENCE: Final = 300.0
_WARM_BATCHES: Final = 8


class Side:
    """Processes that do what they are told.

    Args:
        body: runs in each: ``body(connection, rank, *arguments)``.
        count: how many there are.
    """

    def __init__(self, body: Any, count: int, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(count)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=body, args=(theirs, rank, *arguments))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def ask(self, *command: Any) -> Any:
        """Have all do something; what the first says.

        Raises:
            SystemExit: one has failed.
        """
        for pipe in self._pipes:
            pipe.send(command)
        answers = []
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            wait([pipe, process.sentinel], _PATIENCE)
            if not pipe.poll():
                raise SystemExit(f"a process does not answer to {command[0]}, or has died")
            failed, answer = pipe.recv()
            if failed:
                raise SystemExit(answer)
            answers.append(answer)
        return answers[0]

    def end(self) -> None:
        """Let them leave."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(30.0)
            if process.is_alive():
                process.kill()


def _told(connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError:  # the parent has failed
        return None


def _obey(connection: Connection, does: Any) -> None:
    while (command := _told(connection)) is not None:
        name, *arguments = command
        try:
            connection.send((False, getattr(does, name)(*arguments)))
        except Exception:
            connection.send((True, traceback.format_exc()))


class _Runs:
    """Steps that were made, by case and backend."""

    def __init__(self) -> None:
        self._steps: dict[Any, Step] = {}

    def _run(self, step: Step, count: int) -> float:
        loss = torch.zeros(())
        for _ in range(count):
            loss = step()
        return loss.item()


# ---- ours


def OnDevice(workers: int, threads: int) -> Side:  # noqa: N802
    """A driver, and its workers."""
    return Side(_drive, 1, workers, threads)


def _drive(connection: Connection, rank: int, workers: int, threads: int) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    spmd.use_spmd(workers=workers)
    _obey(connection, _Driver(workers))
    spmd.shutdown()


class _Driver(_Runs):
    def __init__(self, workers: int) -> None:
        super().__init__()
        self._workers = workers

    def make(self, case: str, sizes: Sizes) -> float:
        """Make a model; the loss of the third step."""
        step = self._steps[case] = on_device(case, self._workers, sizes)
        return self._run(step, 3)

    def run(self, case: str, count: int) -> float:
        """Return the time per step in seconds, over ``count`` steps."""
        spmd.sync()
        begin = time.perf_counter()
        self._run(self._steps[case], count)
        return (time.perf_counter() - begin) / count

    def warm(self, case: str, count: int) -> None:
        """Run batches of ``count`` steps until their programs are made, linked, and rewritten by passes."""
        known = -1
        for _ in range(_WARM_BATCHES):
            self.run(case, count)
            before, known = known, len(self._session._programs)
            if known == before:
                return

    @property
    def _session(self) -> Any:
        return engine()

    def recorded(self, case: str, count: int = 8) -> tuple[float, float]:
        """Return the driver's CPU time in seconds per step, and per recorded operation; the minimum over
        ``count`` steps.

        Workers wait in the meantime. Recording is the part below PyTorch's autograd, and sending.
        """
        recorder = engine().recorder
        run, dispatch = recorder._run, LogicalTensor.__torch_dispatch__
        operations, recording = 0, 0.0

        def counted(recorded: Recording) -> None:
            nonlocal operations, recording
            operations += len(recorded.operations)
            begin = time.thread_time()
            run(recorded)
            recording += time.thread_time() - begin

        def timed(*operation: Any) -> Any:
            nonlocal recording
            begin, before = time.thread_time(), recording
            result = dispatch(*operation)
            recording = before + time.thread_time() - begin  # what it calls is in it
            return result

        steps, costs = [], []
        recorder._run = counted
        try:
            for place in range(2 * count):
                spmd.sync()
                dispatch_with(timed if place % 2 else dispatch)
                operations, recording = 0, 0.0
                begin = time.process_time()
                self._steps[case]()
                recorder.flush()
                steps.append(time.process_time() - begin)
                costs.append(recording / operations)
        finally:
            recorder._run = run
            dispatch_with(dispatch)
        return min(steps[2::2]), min(costs[3::2])

    def sent(self, case: str, count: int) -> float:
        """Return the bytes per step that a worker sends, for the worker that sends most, over ``count``
        steps.
        """
        self._on_workers(counting.count_sent)
        spmd.sync()
        self._on_workers(counting.sent)
        self._run(self._steps[case], count)
        return max(self._on_workers(counting.sent)) / count

    def _on_workers(self, function: Any) -> list[float]:
        return [rpc.rpc_sync(name, function) for name in worker_names()]


# ---- by hand


def ByHand(size: int, threads: int) -> Side:  # noqa: N802
    """Ranks of a process group, on our backend and on gloo."""
    folder = tempfile.mkdtemp(prefix="farcall-bench-")
    return Side(_be_rank, size, size, threads, str(Path(folder) / "store"))


def _be_rank(connection: Connection, rank: int, size: int, threads: int, store: str) -> None:
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")  # of names that PyTorch has new ones for
    dist.init_process_group("farcall", init_method=f"file://{store}", rank=rank, world_size=size)
    _obey(connection, _Rank())
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        shutil.rmtree(Path(store).parent, ignore_errors=True)


class _Rank(_Runs):
    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[str, Any] = {
            "farcall": dist.group.WORLD,
            "gloo": dist.new_group(backend="gloo"),
        }

    def make(self, case: str, backend: str, sizes: Sizes) -> float:
        """Make a model; the loss of the third step."""
        step = self._steps[case, backend] = by_hand(case, self._groups[backend], sizes)
        loss = torch.tensor(self._run(step, 3))
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    def run(self, case: str, backend: str, count: int) -> float:
        """Return the time per step in seconds, over ``count`` steps."""
        dist.barrier()
        begin = time.perf_counter()
        self._run(self._steps[case, backend], count)
        dist.barrier()
        return (time.perf_counter() - begin) / count

"""The command ``python -m benchmarks.spmd_recording``: what SPMD mode costs the driver.

Workers are simulated: they are sent everything, and do nothing. Printed are microseconds for each operation
that is recorded, of several kinds, PyTorch's own part included; and a training step of the decoder of
``benchmarks.spmd`` for few and for many workers. All are of CPU time, the least of many batches.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.spmd_cases import Sizes, on_device
from spmd.engine.driver import start
from spmd.engine.driver.current import DEVICE, set_engine
from spmd.engine.driver.device import set_up
from spmd.engine.driver.logical_tensor import LogicalTensor
from spmd.engine.driver.session import Session
from spmd.engine.program.step_messages import Answer, EngineStep

__all__ = ["main"]

_BAR: Final = 10.0
"""Microseconds for an operation."""

_BATCH, _BATCHES = 20, 300

_PATIENCE: Final = 4.0
"""Seconds for a kind of operation."""


class _Silent:
    """A worker that does nothing."""

    name = "silent"

    def send(self, step: EngineStep) -> Any:
        future: torch.futures.Future[Answer] = torch.futures.Future()
        future.set_result(Answer())
        return future

    def abort(self, reason: str) -> None:
        pass

    def skip(self, number: int) -> None:
        pass

    def regroup(self, generation: int) -> Any:
        return self.send(EngineStep(0, 0))


@contextlib.contextmanager
def _session(workers: int) -> Iterator[Session]:
    set_up()
    ports = [_Silent() for _ in range(workers)]
    session = Session(ports, LogicalTensor)
    mode: Any = SimpleNamespace(session=session, ports=ports)
    set_engine(session)
    start._mode = mode
    try:
        yield session
    finally:
        start._mode = None
        set_engine(None)


def _least(function: Callable[[], object], session: Session) -> tuple[float, float]:
    """Seconds of a call, and operations that it records."""
    session.recorder.flush()
    function()
    recorded = len(session.recorder.recording.operations)
    session.recorder.flush()
    least = float("inf")
    until = time.monotonic() + _PATIENCE
    for place in range(_BATCHES):
        if place > 2 and time.monotonic() > until:
            break
        begin = time.process_time()  # the backward is on a thread of its own
        for _ in range(_BATCH):
            function()
        least = min(least, (time.process_time() - begin) / _BATCH)
        session.recorder.flush()
    return least, recorded


def _operations(table: Table) -> None:
    with _session(2) as session:
        x, y, ones = (torch.zeros(shape).to(DEVICE) for shape in ((8, 16), (8, 16), (16,)))
        weight = torch.zeros(16, 16).to(DEVICE).requires_grad_()

        def chain() -> None:
            z = weight
            for _ in range(100):
                z = z.tanh()
            z.sum().backward()  # type: ignore[no-untyped-call]

        kinds: dict[str, Callable[[], object]] = {
            "x + y": lambda: x + y,
            "x @ weight, for autograd": lambda: x @ weight,
            "x.t() + 1: a view, read": lambda: x.t() + 1,
            "x.add_(y)": lambda: x.add_(y),
            "x.view(128).add_(1): a view, written": lambda: x.view(128).add_(1),
            "x.topk(3): two results": lambda: x.topk(3),
            "layer_norm: three results": lambda: torch.native_layer_norm(x, (16,), ones, ones, 1e-5),
            "chain of 100 tanh, with backward": chain,
        }
        for name, function in kinds.items():
            seconds, operations = _least(function, session)
            cost = seconds * 1e6 / operations
            verdict = "held" if cost <= _BAR else "missed"
            table.add_row(name, f"{operations:g}", f"{cost:.1f}", f"{verdict}: {_BAR:g}")


def _steps(table: Table, many: int) -> None:
    for case in ("data", "fsdp"):
        costs: list[float] = []
        for workers in (2, many):
            with _session(workers) as session:
                step = on_device(case, workers, Sizes(width=64, batch=many, length=32, vocabulary=64))
                least = float("inf")
                for place in range(12):
                    begin = time.process_time()
                    step()
                    session.sync()
                    if place > 3:
                        least = min(least, time.process_time() - begin)
                costs.append(least)
        few, more = costs
        sends = (more - few) / (many - 2)
        table.add_row(
            f"decoder, {case}: a step for {many} workers",
            "",
            f"{more * 1e6:.0f}",
            f"{few * 1e6:.0f} for 2; {sends * 1e6:.0f} for each worker more",
        )


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spmd_recording", description=__doc__)
    parser.add_argument("--workers", type=int, default=32, help="of the larger session; default 32")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    table = Table("", "operations", "µs", "")
    _operations(table)
    _steps(table, arguments.workers)
    Console(highlight=False, width=110).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

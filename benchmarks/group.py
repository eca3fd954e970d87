"""Two fresh worker processes for each measurement, forked from a parent that has imported torch only.

Forking takes milliseconds where a new interpreter takes seconds to import torch. The parent must not start
threads: a child would have the locks that they held.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.workloads import WORKLOADS

__all__ = ["MODULES", "MeasurementFailed", "is_available", "measure"]

MODULES = {"farcall": "rpc", "torch": "torch.distributed.rpc"}
"""What can be measured, and the module that has it."""


class MeasurementFailed(Exception):
    """A worker raised an error, died or took too long; the message has its traceback."""


def is_available(side: str) -> bool:
    """Whether a side can be measured here. Asked in a child, so that this process imports neither."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_try_import, args=(MODULES[side],))
    child.start()
    child.join()
    return child.exitcode == 0


def _try_import(module: str) -> None:
    try:
        rpc = importlib.import_module(module)
    except ImportError:
        raise SystemExit(1) from None
    raise SystemExit(0 if hasattr(rpc, "init_rpc") else 1)


def measure(side: str, workloads: Sequence[str], timeout: float) -> dict[str, float]:
    """Run workloads on two fresh workers of one side.

    Args:
        side: a key of ``MODULES``.
        workloads: names of workloads.
        timeout: seconds that all of them may take.

    Returns:
        The number that each workload has measured.

    Raises:
        MeasurementFailed: a worker failed.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="farcall-bench-") as folder:
        results, ours = context.Pipe(duplex=False)
        workers = [
            context.Process(target=_work, args=(rank, side, tuple(workloads), Path(folder), ours))
            for rank in (0, 1)
        ]
        try:
            for worker in workers:
                worker.start()
            ours.close()
            return _receive(side, results, timeout)
        finally:
            for worker in workers:
                worker.join(5)
                if worker.is_alive():
                    worker.kill()
                    worker.join()


def _receive(side: str, results: Connection, timeout: float) -> dict[str, float]:
    if not wait([results], timeout):
        raise MeasurementFailed(f"{side}: no result after {timeout:g} s")
    with contextlib.suppress(EOFError):
        outcome: dict[str, float] | str = results.recv()
        if isinstance(outcome, dict):
            return outcome
        raise MeasurementFailed(f"{side}: {outcome}")
    raise MeasurementFailed(f"{side}: a worker died")


def _work(rank: int, side: str, workloads: tuple[str, ...], folder: Path, results: Connection) -> None:
    warnings.simplefilter("ignore")  # PyTorch's own, about its deprecated parts
    try:
        rpc: Any = importlib.import_module(MODULES[side])
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rendezvous")
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        if rank == 0:
            numbers = {name: WORKLOADS[name].measure(rpc) for name in workloads}
            rpc.shutdown()
            results.send(numbers)
        else:
            rpc.shutdown()
    except BaseException:
        results.send(traceback.format_exc())
        raise SystemExit(1) from None

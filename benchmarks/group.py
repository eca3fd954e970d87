"""Fresh worker processes for each measurement, forked from a parent that has imported torch only.

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
from typing import Any

from benchmarks import serving
from benchmarks.workload import Workload
from benchmarks.workloads import WORKLOADS

__all__ = ["MODULES", "MeasurementFailed", "is_available", "measure"]

MODULES = {
    "farcall": "rpc",
    "torch": "torch.distributed.rpc",
    "grpc": "benchmarks.grpc_peer",
    "ray": "benchmarks.ray_peer",
}
"""What can be measured, and the module that has it."""

_CALLS_OF = {
    "grpc": frozenset(("null", "small", "window", "recursion", "idle", "busy")),
    "ray": frozenset(("null", "small", "remote", "window", "idle")),
}
"""What these can run beside large tensors. gRPC has no remote references, Ray no calls back to its driver."""
_STARTS_ITS_WORKERS = frozenset(("ray",))
_NETWORK_OPTIONS: dict[str, dict[str, Any]] = {
    "farcall": {"transports": ["tcp"], "shared_memory_bytes": 0},
    "torch": {"_transports": ["uv"], "_channels": ["basic"]},
    "grpc": {},
    "ray": {},
}
"""What makes the workers of a side behave as if they were on different hosts."""


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


def can_run(side: str, workload: Workload) -> bool:
    """Whether a side has what a workload needs."""
    if workload.stripes:
        return side == "farcall"
    calls = _CALLS_OF.get(side)
    if calls is None:
        return True
    return workload.name in calls or (workload.part == "tensors" and not (side == "ray" and workload.network))


def measure(side: str, workloads: Sequence[str], timeout: float) -> dict[str, float]:
    """Run workloads on fresh workers of one side; those that need as many workers, on the same.

    Args:
        side: a key of ``MODULES``.
        workloads: names of workloads.
        timeout: seconds that each group of workers may take.

    Returns:
        The number that each workload has measured; nothing for those that the side cannot run.

    Raises:
        MeasurementFailed: a worker failed.
    """
    numbers: dict[str, float] = {}
    chosen = [WORKLOADS[name] for name in workloads if can_run(side, WORKLOADS[name])]
    for kind in sorted({_kind_of_group(each) for each in chosen}):
        names = [each.name for each in chosen if _kind_of_group(each) == kind]
        numbers |= _measure_group(side, names, kind, timeout)
    return numbers


def _kind_of_group(workload: Workload) -> tuple[int, bool, int]:
    """What a group of workers has to have: how many, over TCP, with how many stripes."""
    return workload.workers, workload.network, workload.stripes


def _measure_group(
    side: str, workloads: Sequence[str], kind: tuple[int, bool, int], timeout: float
) -> dict[str, float]:
    workers, network, stripes = kind
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="farcall-bench-") as folder:
        results, ours = context.Pipe(duplex=False)
        processes = [
            context.Process(
                target=_work,
                args=(rank, workers, side, _options(side, network, stripes), tuple(workloads), folder, ours),
            )
            for rank in range(1 if side in _STARTS_ITS_WORKERS else workers)
        ]
        try:
            for process in processes:
                process.start()
            ours.close()
            return _receive(side, results, timeout)
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _options(side: str, network: bool, stripes: int) -> dict[str, Any]:
    options = dict(_NETWORK_OPTIONS[side]) if network else {}
    if stripes:
        options["tcp_stripes"] = stripes
    return options


def _receive(side: str, results: Connection, timeout: float) -> dict[str, float]:
    if not wait([results], timeout):
        raise MeasurementFailed(f"{side}: no result after {timeout:g} s")
    with contextlib.suppress(EOFError):
        outcome: dict[str, float] | str = results.recv()
        if isinstance(outcome, dict):
            return outcome
        raise MeasurementFailed(f"{side}: {outcome}")
    raise MeasurementFailed(f"{side}: a worker died")


def _work(
    rank: int,
    workers: int,
    side: str,
    given: dict[str, Any],
    workloads: tuple[str, ...],
    folder: str,
    results: Connection,
) -> None:
    warnings.simplefilter("ignore")  # PyTorch's own, about its deprecated parts
    try:
        rpc: Any = importlib.import_module(MODULES[side])
        kind = rpc.AgentOptions if side == "farcall" else rpc.TensorPipeRpcBackendOptions
        options = kind(init_method=f"file://{folder}/rendezvous", **given)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=workers, rpc_backend_options=options)
        if rank == 0:
            numbers = {name: WORKLOADS[name].measure(rpc) for name in workloads}
            for other in range(1, workers):
                rpc.rpc_sync(f"worker{other}", serving.finish)
            rpc.shutdown()
            results.send(numbers)
        else:
            serving.serve()
            rpc.shutdown()
    except BaseException:
        results.send(traceback.format_exc())
        raise SystemExit(1) from None

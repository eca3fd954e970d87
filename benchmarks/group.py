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
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import serving, turns
from benchmarks.workload import Workload
from benchmarks.workloads import WORKLOADS

__all__ = ["MODULES", "is_available", "measure"]

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


def measure(sides: Sequence[str], workloads: Sequence[str], timeout: float) -> dict[str, dict[str, float]]:
    """Run workloads on fresh workers of all sides, which take turns; those that need as many workers, on the
    same.

    Args:
        sides: keys of ``MODULES``.
        workloads: names of workloads.
        timeout: seconds that the groups of workers of one kind may take.

    Returns:
        For each side the number that each workload has measured; nothing for those that it cannot run.

    Raises:
        Failed: a worker failed.
    """
    numbers: dict[str, dict[str, float]] = {side: {} for side in sides}
    chosen = [WORKLOADS[name] for name in workloads]
    for kind in sorted({_kind_of_group(each) for each in chosen}):
        alike = [each for each in chosen if _kind_of_group(each) == kind]
        with contextlib.ExitStack() as groups:
            taking_turns: dict[str, turns.Side] = {}
            for side in sides:
                names = tuple(each.name for each in alike if can_run(side, each))
                if names:
                    taking_turns[side] = groups.enter_context(_group(side, names, kind))
            for side, found in turns.referee(taking_turns, timeout).items():
                numbers[side] |= found
    return numbers


def _kind_of_group(workload: Workload) -> tuple[int, bool, int]:
    """What a group of workers has to have: how many, over TCP, with how many stripes."""
    return workload.workers, workload.network, workload.stripes


@contextlib.contextmanager
def _group(side: str, workloads: tuple[str, ...], kind: tuple[int, bool, int]) -> Iterator[turns.Side]:
    """A side's workers."""
    workers, network, stripes = kind
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="farcall-bench-") as folder:
        ours, theirs = context.Pipe()
        given = _options(side, network, stripes)
        processes = [
            context.Process(target=_work, args=(rank, workers, side, given, workloads, folder, theirs))
            for rank in range(1 if side in _STARTS_ITS_WORKERS else workers)
        ]
        try:
            for process in processes:
                process.start()
            theirs.close()
            group = turns.Side(ours, [process.pid for process in processes if process.pid is not None])
            try:
                yield group
            finally:
                group.go_on()
        finally:
            ours.close()
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


def _work(
    rank: int,
    workers: int,
    side: str,
    given: dict[str, Any],
    workloads: tuple[str, ...],
    folder: str,
    parent: Connection,
) -> None:
    warnings.simplefilter("ignore")  # PyTorch's own, about its deprecated parts
    try:
        rpc: Any = importlib.import_module(MODULES[side])
        kind = rpc.AgentOptions if side == "farcall" else rpc.TensorPipeRpcBackendOptions
        options = kind(init_method=f"file://{folder}/rendezvous", **given)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=workers, rpc_backend_options=options)
        if rank == 0:
            turns.go_by_turns(parent)
            numbers = {name: WORKLOADS[name].measure(rpc) for name in workloads}
            for other in range(1, workers):
                rpc.rpc_sync(f"worker{other}", serving.finish)
            rpc.shutdown()
            parent.send(numbers)
        else:
            serving.serve()
            rpc.shutdown()
    except BaseException:
        with contextlib.suppress(OSError):  # the parent has given up
            parent.send(traceback.format_exc())
        raise SystemExit(1) from None

"""Workloads measured on fresh workers of all sides; those that need the same kind of group, on the same."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import serving
from benchmarks.budget import show
from benchmarks.certificates import Certificate
from benchmarks.sides import Side
from benchmarks.turns import Failure, Workers, take_turns, work_by_turns
from benchmarks.workload import Workload, instead
from benchmarks.workloads import WORKLOADS

__all__ = ["measure"]


def measure(
    sides: Sequence[Side], names: Sequence[str], limit: float, *, budget: bool = False
) -> Iterator[tuple[str, dict[str, float | Failure]]]:
    """Yield the name of each workload and, by side, what was measured; without those that cannot run it.

    A side that fails or takes too long is ended, and gets fresh workers for its next workload.

    Args:
        sides: take turns.
        names: of workloads.
        limit: seconds that one workload may take one side.
        budget: whether to print where a step's time goes.
    """
    kind, groups = None, dict[str, Workers]()
    kill = True
    try:
        for workload in sorted((WORKLOADS[name] for name in names), key=_kind_of_group):
            if kind != _kind_of_group(workload):
                kind = _kind_of_group(workload)
                _end(groups, kill=False)
            able = [side for side in sides if side.can_run(workload)]
            for side in able:
                if side.name not in groups:
                    groups[side.name] = _group(side, workload, budget)
            outcomes = take_turns({side.name: groups[side.name] for side in able}, workload.name, limit)
            for name, outcome in outcomes.items():
                if isinstance(outcome, Failure):
                    groups.pop(name).end(kill=True)
            yield workload.name, outcomes
        kill = False
    finally:
        _end(groups, kill=kill)


def _end(groups: dict[str, Workers], *, kill: bool) -> None:
    while groups:
        groups.popitem()[1].end(kill=kill)


def _kind_of_group(workload: Workload) -> tuple[int, bool, int, bool]:
    """The requirements for a group of workers: their number, over TCP, with how many stripes, with TLS."""
    return workload.workers, workload.network, workload.stripes, workload.encrypted


def _group(side: Side, workload: Workload, budget: bool) -> Workers:
    count, options = workload.workers, dict(side.network) if workload.network else {}
    if workload.stripes:
        options["tcp_stripes"] = workload.stripes
    certificate = Certificate() if workload.encrypted and side.encrypts else None

    def work(rank: int, folder: Path, parent: Connection) -> None:
        warnings.simplefilter("ignore")  # of parts of PyTorch that are deprecated
        try:
            rpc = side.load()
            if certificate is not None:
                options["tls"] = certificate.options(rpc, folder, rank)
            given = getattr(rpc, side.options)(init_method=f"file://{folder}/rendezvous", **options)
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=count, rpc_backend_options=given)
        except Exception as error:
            if rank == 0:
                parent.recv()
                parent.send(_failure(error))
            raise
        if rank == 0:
            work_by_turns(parent, lambda name: _measured(WORKLOADS[name], rpc, budget))
            for other in range(1, count):
                rpc.rpc_sync(f"worker{other}", serving.finish)
        else:
            serving.serve()
        rpc.shutdown()

    return Workers(work, 1 if side.starts_its_workers else count)


def _measured(workload: Workload, rpc: Any, budget: bool) -> float | Failure:
    try:
        if budget:
            instead[:] = [partial(show, workload.title, rpc)]
        return workload.measure(rpc)
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> Failure:
    return Failure(type(error).__name__, "".join(traceback.format_exception(error)))

"""All workloads by name, in the order in which they run."""

from __future__ import annotations

from benchmarks import busy, calls, striping, training, transfers
from benchmarks.workload import Workload

__all__ = ["WORKLOADS"]

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for module in (calls, busy, transfers, striping, training)
    for workload in module.workloads()
}

"""The number of cores that this process can use.

A container often may use less than the cores that it sees: a *quota* limits its computing time in each period
of 0.1 s. When it is used up, all threads of the process are stopped until the period is over, so a thread
that spins beside one that computes costs that one far more than it may save. Quotas belong to control groups,
and apply to all groups below.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from rpc.runtime.control_groups import GROUPS, MEMBERSHIP, control_groups


def usable_cores(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the number of cores that this process may run on, or fewer if its control groups have lower
    quotas.

    Args:
        groups: where control groups are mounted.
        membership: the file that lists this process's groups.

    Returns:
        At least 1. Fractions are rounded down.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # not available on all systems
    seen = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, int(min([seen, *_quotas(groups, membership)])))


def _quotas(groups: Path, membership: Path) -> Iterator[float]:
    """Yield the quota of each of the process's groups, in cores."""
    for group, version in control_groups("cpu", groups, membership):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no such group, or no quota
            yield _quota(group, version)


def _quota(group: Path, version: int) -> float:
    if version == 1:
        quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    else:
        quota, period = map(int, (group / "cpu.max").read_text().split())  # ValueError for "max"
    if quota < 0:
        raise ValueError("no quota")
    return quota / period

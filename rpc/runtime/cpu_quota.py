"""How many cores this process can keep busy.

A container is often given less than the cores that it sees: a *quota*, so much computing time in each period
of 0.1 s. When it is used up, all of the process's threads stand still until the period is over, so a thread
that spins beside one that computes costs that one far more than it may save. Quotas belong to control groups
(``cgroups`` of Linux, version 1 or 2), and count for all groups below.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

_GROUPS: Final = Path("/sys/fs/cgroup")
_MEMBERSHIP: Final = Path("/proc/self/cgroup")


def usable_cores(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int:
    """The cores that this process may run on, or fewer, if its control groups do not pay for as many.

    Args:
        groups: where control groups are mounted.
        membership: the file that says which are this process's.

    Returns:
        At least 1. Of a fraction of a core, nothing counts.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # not on all systems
    seen = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, int(min([seen, *_quotas(groups, membership)])))


def _quotas(groups: Path, membership: Path) -> Iterator[float]:
    """What the process's groups may compute, each, in cores."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # another system, or nothing is mounted there
        return
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container, the path may be as seen from outside; the root is the container's own group then.
        group = PurePosixPath(path.lstrip("/"))
        for each in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # no such group, or no quota
                yield _quota(groups / controllers / each, version=1 if controllers else 2)


def _quota(group: Path, version: int) -> float:
    if version == 1:
        quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    else:
        quota, period = map(int, (group / "cpu.max").read_text().split())  # ValueError where it says "max"
    if quota < 0:
        raise ValueError("no quota")
    return quota / period

"""What the kernel says about the time that is used on the cores, and that may be used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

__all__ = ["Usage", "is_limited", "usage"]

_ROOT: Final = Path("/")
_CLOCK_TICK: Final = 0.01
"""Seconds, as the kernel's accounts count them."""
_FIRST_LINE_BYTES: Final = 256


class Usage(NamedTuple):
    """Seconds since the machine was started, summed over its cores.

    Attributes:
        stolen: in which a core would have run, and the host of this virtual machine let others run.
        wanted: these, and those in which one did run.
    """

    stolen: float
    wanted: float


def usage(root: Path = _ROOT) -> Usage | None:
    """What was used until now; None if that cannot be known.

    Args:
        root: where ``proc`` lies.
    """
    try:
        with open(root / "proc/stat", "rb", buffering=0) as file:
            fields = file.read(_FIRST_LINE_BYTES).splitlines()[0].split()
        user, nice, system, _idle, _waiting, irq, softirq, stolen = map(int, fields[1:9])
    except (OSError, LookupError, ValueError):
        return None
    ran = user + nice + system + irq + softirq
    return Usage(stolen * _CLOCK_TICK, (ran + stolen) * _CLOCK_TICK)


def is_limited(root: Path = _ROOT) -> bool:
    """Whether this process's control groups limit its time, as ``docker run --cpus`` and Kubernetes do.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    return any(_says_limit(file) for file in _limits(root))


def _limits(root: Path) -> Iterator[Path]:
    """Files that may tell of a limit: of the process's groups and of those around them."""
    mounted = root / "sys/fs/cgroup"
    try:
        groups = (root / "proc/self/cgroup").read_text(errors="surrogateescape")
    except OSError:
        return
    for line in groups.split("\n"):
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for each in (group, *group.parents):
            if not controllers:
                yield mounted / each / "cpu.max"
            elif "cpu" in controllers.split(","):
                yield mounted / controllers / each / "cpu.cfs_quota_us"
                yield mounted / "cpu" / each / "cpu.cfs_quota_us"


def _says_limit(file: Path) -> bool:
    try:
        quota = file.read_text().split()[0]
    except (OSError, LookupError, ValueError):
        return False
    return quota.isdigit()

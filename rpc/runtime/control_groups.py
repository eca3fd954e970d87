"""The control groups of this process (``cgroups`` of Linux, version 1 or 2), whose limits apply to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

__all__ = ["GROUPS", "MEMBERSHIP", "control_groups"]

GROUPS: Final = Path("/sys/fs/cgroup")
"""Where control groups are mounted."""

MEMBERSHIP: Final = Path("/proc/self/cgroup")
"""The file that lists the groups of this process."""


def control_groups(
    controller: str, groups: Path = GROUPS, membership: Path = MEMBERSHIP
) -> Iterator[tuple[Path, int]]:
    """Yield the folders of this process's groups that may limit what a controller counts, and their version.

    Args:
        controller: such as ``cpu`` or ``memory``.
        groups: see ``GROUPS``.
        membership: see ``MEMBERSHIP``.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # another system, or nothing is mounted there
        return
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        # In a container, the path may be the one seen from outside; then the root is the container's own
        # group.
        group = PurePosixPath(path.lstrip("/"))
        for each in (group, *group.parents):
            yield groups / controllers / each, 1 if controllers else 2

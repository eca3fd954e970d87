"""How many cores a process can keep busy: those it may run on, as far as its control groups pay for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rpc.runtime.cpu_quota import usable_cores

SEEN = 16


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(SEEN)), raising=False)


def usable(folder: Path, membership: str, files: dict[str, str]) -> int:
    """What is found where ``files``, by path, are all that there is under the mount point."""
    for path, text in files.items():
        (folder / "groups" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "groups" / path).write_text(text + "\n")
    (folder / "membership").write_text(membership)
    return usable_cores(folder / "groups", folder / "membership")


VERSION_2 = "0::/a/b\n"
VERSION_1 = "3:memory:/m\n2:cpu,cpuacct:/a/b\n1:name=systemd:/s\n0::/a/b\n"


def version_1(path: str, quota: int, period: int = 100_000) -> dict[str, str]:
    """A group's files."""
    return {f"{path}/cpu.cfs_quota_us": str(quota), f"{path}/cpu.cfs_period_us": str(period)}


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (VERSION_2, {}, SEEN),
        (VERSION_2, {"a/b/cpu.max": "max 100000"}, SEEN),
        (VERSION_2, {"a/b/cpu.max": "400000 100000"}, 4),
        (VERSION_2, {"a/b/cpu.max": "250000 100000"}, 2),
        (VERSION_2, {"a/b/cpu.max": "10000 100000"}, 1),
        (VERSION_2, {"a/b/cpu.max": "3200000 100000"}, SEEN),
        (VERSION_2, {"a/b/cpu.max": "400000 100000", "a/cpu.max": "300000 100000"}, 3),
        (VERSION_2, {"a/b/cpu.max": "max 100000", "cpu.max": "200000 100000"}, 2),
        (VERSION_2, {"a/b/cpu.max": "nonsense"}, SEEN),
        (VERSION_2, {"a/b/cpu.max": "100000 0"}, SEEN),
        ("0::/\n", {"cpu.max": "500000 100000"}, 5),
        (VERSION_1, version_1("cpu,cpuacct/a/b", 600_000), 6),
        (VERSION_1, version_1("cpu,cpuacct/a/b", -1), SEEN),
        (VERSION_1, version_1("cpu,cpuacct/a/b", 100_000, 50_000), 2),
        (VERSION_1, version_1("cpu,cpuacct", 300_000), 3),
        ("", {"cpu.max": "100000 100000"}, SEEN),
        ("nonsense\n", {}, SEEN),
    ],
)
def test_usable_cores(tmp_path: Path, membership: str, files: dict[str, str], expected: int) -> None:
    assert usable(tmp_path, membership, files) == expected


def test_where_there_are_no_groups_all_cores_count(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path / "missing") == SEEN


def test_no_more_cores_count_than_the_process_may_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3}, raising=False)
    assert usable(tmp_path, VERSION_2, {"a/b/cpu.max": "400000 100000"}) == 1

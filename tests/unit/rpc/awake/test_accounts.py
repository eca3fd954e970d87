"""What is read of the kernel's accounts, from files that a test has written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rpc.awake.accounts import is_limited, usage


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_usage_is_in_seconds_and_leaves_out_idle_time(tmp_path: Path) -> None:
    write(tmp_path, "proc/stat", "cpu  100 20 30 9999 8888 4 6 40 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    found = usage(tmp_path)
    assert found is not None
    assert found.stolen == pytest.approx(0.4)
    assert found.wanted == pytest.approx(2.0)


@pytest.mark.parametrize("text", ["", "cpu 1 2 3", "nonsense\n", "cpu a b c d e f g h\n"])
def test_what_cannot_be_read_is_not_known(tmp_path: Path, text: str) -> None:
    write(tmp_path, "proc/stat", text)
    assert usage(tmp_path) is None


def test_without_accounts_nothing_is_known(tmp_path: Path) -> None:
    assert usage(tmp_path) is None
    assert not is_limited(tmp_path)


@pytest.mark.parametrize(
    ("groups", "file", "text", "limited"),
    [
        ("0::/\n", "cpu.max", "50000 100000\n", True),
        ("0::/\n", "cpu.max", "max 100000\n", False),
        ("0::/a/b\n", "a/b/cpu.max", "50000 100000\n", True),
        ("0::/a/b\n", "a/cpu.max", "50000 100000\n", True),
        ("0::/a/b\n", "other/cpu.max", "50000 100000\n", False),
        ("0::/a\n", "a/cpu.max", "\n", False),
        ("4:cpu,cpuacct:/a\n", "cpu,cpuacct/a/cpu.cfs_quota_us", "50000\n", True),
        ("4:cpu,cpuacct:/a\n", "cpu/a/cpu.cfs_quota_us", "50000\n", True),
        ("4:cpu,cpuacct:/a\n", "cpu/a/cpu.cfs_quota_us", "-1\n", False),
        ("nonsense\n0::/a\n", "a/cpu.max", "50000 100000\n", True),
        ("4:cpuset:/a\n", "cpuset/a/cpu.cfs_quota_us", "50000\n", False),
    ],
)
def test_a_limit_of_a_group_or_of_one_around_it_counts(
    tmp_path: Path, groups: str, file: str, text: str, limited: bool
) -> None:
    write(tmp_path, "proc/self/cgroup", groups)
    write(tmp_path, f"sys/fs/cgroup/{file}", text)
    assert is_limited(tmp_path) is limited


def test_a_group_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/caf\xe9:1\n")
    group = tmp_path / "sys/fs/cgroup" / os.fsdecode(b"caf\xe9:1")
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("1 2")
    assert is_limited(tmp_path)

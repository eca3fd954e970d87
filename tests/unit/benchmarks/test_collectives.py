"""The benchmark of collectives, from its command."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly


def namespaces() -> set[str]:
    return set(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else set()


def test_ranks_on_hosts_of_their_own_are_measured_and_leave_nothing() -> None:
    before = namespaces()
    command = [sys.executable, "-m", "benchmarks.collectives", "all-reduce 8 B", "--tcp", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr
    assert "all-reduce 8 B, 2 ranks:" in done.stdout
    assert namespaces() == before
    if "there are no network namespaces" in done.stdout:
        pytest.skip(done.stdout.splitlines()[0])

"""``farcall launch``: what it prints, how it ends, and what is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import leftovers

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parent.parent.parent.parent

SCRIPT = """
import os, signal, sys, threading
import rpc

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def wait():
    threading.Event().wait()

def fail():
    raise LookupError("bad luck")

rpc.init_rpc(f"worker{rank}")
if sys.argv[1] != "succeed":
    if rank == 1:
        rpc.barrier()
        {"raise": fail, "die": lambda: os.kill(os.getpid(), signal.SIGKILL)}[sys.argv[1]]()
    rpc.barrier()
    rpc.rpc_sync("worker1", wait)
print("called", rpc.rpc_sync((rank + 1) % world_size, rpc.get_worker_info).name)
rpc.shutdown()
"""


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(SCRIPT)
    with leftovers.nothing_left():
        return subprocess.run(
            [sys.executable, "-m", "farcall", "launch", "-n", "2", "program.py", *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=80,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        )


@pytest.mark.nightly
def test_output_has_the_rank_before_each_line(tmp_path: Path) -> None:
    done = launch(tmp_path, "succeed")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] called worker1", "[1] called worker0"]
    assert done.stderr.startswith("farcall: ranks 0 to 1 of 2 run here; they meet at 127.0.0.1:")


def test_the_first_failure_is_summed_up_and_the_others_are_ended(tmp_path: Path) -> None:
    done = launch(tmp_path, "raise")
    assert done.returncode == 1
    summary = done.stderr.partition("farcall: rank 1 (process ")[2]
    assert "failed first: it raised LookupError: bad luck\nTraceback" in summary
    assert "in fail\n" in summary


@pytest.mark.nightly
def test_death_by_a_signal_has_its_exit_status(tmp_path: Path) -> None:
    done = launch(tmp_path, "die")
    assert done.returncode == 128 + 9
    assert done.stderr.splitlines()[-1].endswith("failed first: it was killed by SIGKILL")

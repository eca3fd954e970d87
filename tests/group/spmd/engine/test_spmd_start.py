"""Where SPMD mode's workers come from."""

from __future__ import annotations

import multiprocessing.spawn
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import rpc
import spmd
from spmd.engine.errors import SpmdError
from spmd.engine.worker import worker_process

ROOT = Path(__file__).resolve().parents[4]

PROGRAM = """
import torch, spmd
spmd.use_spmd()
x = torch.arange(4.0).to(spmd.device())
x[1:] *= 2
print("sum", x.sum().item(), "of", spmd.global_device_count())
"""
"""Ends without ``shutdown``: its workers must end all the same."""


def run(tmp_path: Path, *prefix: str, program: str = PROGRAM, **variables: str) -> str:
    """What the program prints."""
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, *prefix, str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=80,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.fresh_interpreter
@pytest.mark.processes
def test_workers_are_started_here_and_find_our_packages_though_a_namesake_is_on_the_drivers_path(
    tmp_path: Path,
) -> None:
    namesake = tmp_path / "others" / "spmd"
    namesake.mkdir(parents=True)
    (namesake / "__init__.py").touch()
    program = f"import sys, spmd\nsys.path.insert(0, {str(namesake.parent)!r})\n{PROGRAM}"
    assert run(tmp_path, program=program, FARCALL_SPMD_WORKERS="1") == "sum 12.0 of 1"


@pytest.mark.processes
def test_a_worker_that_ends_while_it_begins_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(shutil.which("false") or ""))
    with pytest.raises(SpmdError, match=r"worker spmd[01] \(process \d+\) ended with status 1 while"):
        spmd.use_spmd(workers=2)
    assert not spmd.is_spmd()


@pytest.mark.fresh_interpreter
@pytest.mark.logical_device
@pytest.mark.processes
def test_a_start_that_takes_long_says_for_whom_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rpc.runtime.notices.FIRST_SECONDS", 0.01)
    spmd.use_spmd(workers=1)
    spmd.shutdown()
    assert "s so far to start spmd0" in caplog.text


def test_the_first_argument_is_no_flag() -> None:
    with pytest.raises(TypeError, match="did you mean auto=True"):
        spmd.use_spmd(True)
    assert not spmd.is_spmd()


def test_a_worker_expects_to_wait_long_for_its_driver() -> None:
    with (
        mock.patch.object(rpc, "init_rpc"),
        mock.patch.object(rpc, "shutdown"),
        mock.patch.object(worker_process, "current_agent") as agent,
        pytest.raises(SystemExit),
    ):
        worker_process.serve("worker")
    agent().lifecycle.departure.expect_long.assert_called_once_with()


@pytest.mark.nightly
@pytest.mark.processes
def test_rank_0_drives_under_torchrun(tmp_path: Path) -> None:
    prefix = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
        "--log-dir",
        str(tmp_path),
    )
    assert run(tmp_path, *prefix) == "sum 12.0 of 2"


@pytest.mark.nightly
@pytest.mark.processes
def test_a_driver_that_is_killed_leaves_neither_workers_nor_files(tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    script = tmp_path / "program.py"
    script.write_text(PROGRAM + "import os; os.kill(os.getpid(), 9)\n")
    done = subprocess.run(  # until its workers have closed their ends of the pipes as well
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=80,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FARCALL_SPMD_WORKERS": "2", "TMPDIR": str(folder)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not list(folder.glob("farcall*"))

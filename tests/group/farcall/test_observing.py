"""The commands that look at a job which ``farcall launch`` runs, while it hangs and when it is dead."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launchers import Launchers, launchers
from tests.support.programs import run_program

__all__ = ["launchers"]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[3]

HANGS = """\
import os, threading
import rpc

lock = threading.Lock()

def block():
    with lock:
        pass

def b_calls_a():
    rpc.rpc_sync("worker0", block, timeout=0)

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
print("joined")
if rank == 0:
    with lock:
        rpc.rpc_sync("worker1", b_calls_a, timeout=0)
rpc.shutdown()
"""

CYCLE = [
    r"worker0  MainThread  waits \d+ s for worker1: b_calls_a +program\.py:18",
    r"worker1  farcall-\d+   waits \d+ s for worker0: block +program\.py:11",
    r"worker0  farcall-\d+   runs block, waits for the lock `lock`(, \d+ s)? +program\.py:7",
    r" +held by MainThread since program\.py:17",
    r"cycle: worker0 MainThread → worker1 farcall-\d+ → worker0 farcall-\d+ → lock `lock`",
    r"  held by MainThread",
]


@pytest.fixture(autouse=True)
def own_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each test a folder of jobs of its own: ``farcall ps`` reads all jobs of the folder, and the
    session's has those of all tests.
    """
    monkeypatch.setenv("FARCALL_JOBS_DIR", str(tmp_path / "jobs"))


def ask(folder: Path, *arguments: str) -> str:
    """What a command prints, on a terminal of 80 columns."""
    done = subprocess.run(
        [sys.executable, "-m", "farcall", *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"},
    )
    return done.stdout


def hanging_job(folder: Path) -> Any:
    """The job in the folder, as ``farcall ps`` has it, once both workers are in the hang."""
    while True:
        for job in json.loads(ask(folder, "ps", "--json")):
            workers = [each for each in job["workers"] if each["oldest"] > 4]
            folders = {os.readlink(f"/proc/{each['pid']}/cwd") for each in workers}
            if len(workers) == 2 and folders == {str(folder.resolve())}:
                return job


def is_cycle(text: str) -> bool:
    return re.search("\n".join(CYCLE), text) is not None


def test_hang_is_explained_while_it_lasts_and_when_all_are_dead(launchers: Launchers, tmp_path: Path) -> None:
    folder = tmp_path
    launcher = launchers(HANGS, "-n 2 --log-dir logs")
    launcher.wait_for("joined", 2)
    job = hanging_job(folder)
    name = job["job"]
    while not is_cycle(said := ask(folder, "why", "--job", name)):
        pass  # a worker that gets no core has not looked at its threads lately
    assert re.match(rf"job {name} · 2 workers · nothing has moved for \d+ s\n", said)
    assert max(map(len, said.splitlines())) <= 80

    listed = ask(folder, "ps", "--job", name)
    assert re.search(r"worker0  +0 .* waits .*\nworker1  +1 .* waits .*", listed), listed
    while "block  program.py:7" not in ask(folder, "stacks", "--job", name, "worker0"):
        pass  # one that gets no core is not asked for its stacks
    assert ask(folder, "logs", "--job", name, "1").splitlines() == ["worker1  joined"]

    launcher.send(signal.SIGQUIT)
    launcher.wait_for("held by MainThread since program.py:17")
    launcher.wait_for(f"farcall why --job {name} says more")

    for number in (signal.SIGSTOP, signal.SIGKILL):  # none may see that the other has ended
        for worker in job["workers"]:
            os.kill(worker["pid"], number)
    launcher.end()
    said = ask(folder, "why", "--job", name)
    assert said.startswith(f"job {name} · 2 workers, all dead")
    assert is_cycle(said), said
    found = json.loads(ask(folder, "why", "--job", name, "--json"))
    assert [each["kind"] for each in found["findings"]] == ["cycle"]
    assert found["findings"][0]["nodes"][0]["place"] == "program.py:18"


FAILS = """\
import os, time
import rpc

def fail():
    raise LookupError("bad luck")

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
if rank == 1:
    time.sleep(2)
    fail()
rpc.barrier()
"""


@pytest.mark.nightly
def test_summary_of_a_failure_names_its_line_and_what_the_others_waited_for(tmp_path: Path) -> None:
    done = run_program(tmp_path, FAILS, "-m", "farcall", "launch", "-n", "3", "program.py")
    summary = done.stderr.partition("failed first")[2]
    assert "(program.py:5)" in summary
    assert re.search(
        r"farcall: worker2: MainThread waited .* s in barrier for .*, at program\.py:12", summary
    )


LATE = """\
import os, time
import rpc

def load_data():
    time.sleep(3600)

rank = int(os.environ["RANK"])
print("begins")
if rank == 1:
    load_data()
rpc.init_rpc(f"worker{rank}")
"""


@pytest.mark.nightly
def test_rank_that_has_not_joined_is_named_with_its_line(launchers: Launchers, tmp_path: Path) -> None:
    launcher = launchers(LATE, "-n 2")
    launcher.wait_for("begins", 2)
    found = None
    while found is None or found["kind"] != "sleeps":
        for job in json.loads(ask(tmp_path, "ps", "--json")):
            folders = {os.readlink(f"/proc/{each['pid']}/cwd") for each in job["workers"]}
            if folders == {str(tmp_path.resolve())}:
                findings = json.loads(ask(tmp_path, "why", "--job", job["job"], "--json"))["findings"]
                found = findings[0] if findings and findings[0]["waiting"] else found
    assert "rank 1 MainThread has not called init_rpc: sleeps, at program.py:5 in load_data" in found["text"]
    launcher.send(signal.SIGTERM)
    launcher.end()


def test_without_a_job_it_is_said_that_there_is_none(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "farcall", "why"],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "FARCALL_JOBS_DIR": str(tmp_path / "none")},
    )
    assert done.returncode == 1
    assert "no job of this user has left anything in" in done.stderr

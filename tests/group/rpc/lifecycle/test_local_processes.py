"""``rpc.spawn`` and ``rpc.local_group``, in a script as a user runs it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rpc
from tests.support.programs import run_program
from tests.support.streams import SOON

pytestmark = pytest.mark.processes

SCRIPT = """
import os, signal, sys, threading
from farcall import rpc

calls = 0

def count():
    global calls
    calls += 1
    return calls

def main(what):
    me = rpc.get_worker_info()
    if what != "count" and me.id == 1:
        END[what]()
    if what != "count":
        rpc.rpc_sync("worker1", wait)
    return [rpc.rpc_sync("worker1", count) for _ in range(3)] if me.id == 0 else me.name

def wait():
    threading.Event().wait()

def fail():
    raise LookupError("bad luck")

class Odd(Exception):
    def __init__(self, what, where):
        super().__init__(f"{what} in {where}")

def fail_oddly():
    raise Odd("bad luck", "here")

def die():
    os.kill(os.getpid(), signal.SIGKILL)

END = {"raise": fail, "odd": fail_oddly, "die": die, "exit": lambda: sys.exit(3)}
"""

STARTS = """
if __name__ == "__main__":
    if sys.argv[1] == "group":
        with rpc.local_group(2) as group:
            print(group.me, [(name, rpc.rpc_sync(name, count), rpc.rpc_sync(name, count)) for name in group])
    else:
        print(rpc.spawn(main, sys.argv[1], workers=2))
"""

IMPATIENT = "import rpc.runtime.notices\nrpc.runtime.notices.FIRST_SECONDS = 0.01\nfrom farcall import rpc\n"


def run(folder: Path, what: str, starts: str = STARTS) -> subprocess.CompletedProcess[str]:
    return run_program(folder, SCRIPT + starts, "program.py", what)


@pytest.mark.fresh_interpreter
def test_local_group_serves_this_process_and_says_for_whom_it_waits_if_the_start_takes_long(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, "group", IMPATIENT + STARTS)
    assert (done.returncode, done.stdout) == (0, "main [('worker0', 1, 2), ('worker1', 1, 2)]\n"), done.stderr
    assert "s so far to start worker0, worker1\n" in done.stderr


@pytest.mark.nightly
def test_the_log_level_holds_for_the_start_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARCALL_LOG", "error")
    done = run(tmp_path, "count", IMPATIENT + STARTS)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_worker_that_raises_is_named_with_its_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "raise")
    assert done.returncode == 1
    assert "raised LookupError: bad luck" in done.stderr
    assert "in fail\n" in done.stderr


@pytest.mark.nightly
def test_an_error_that_cannot_be_rebuilt_is_shown(tmp_path: Path) -> None:
    assert "Odd('bad luck in here') cannot be sent" in run(tmp_path, "odd").stderr


@pytest.mark.parametrize("workers", [0, [], 2.5, True, "worker0", None, ["a", "a"]], ids=str)
def test_workers_are_a_number_or_different_names(workers: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="worker"):
        rpc.spawn(print, workers=workers)


@pytest.mark.nightly
def test_a_worker_that_is_killed_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "die")
    assert done.returncode == 1
    assert ") was killed by SIGKILL" in done.stderr.splitlines()[-1]


@pytest.mark.nightly
def test_a_workers_exit_status_is_the_programs(tmp_path: Path) -> None:
    assert run(tmp_path, "exit").returncode == 3


@pytest.mark.nightly
def test_a_script_that_starts_workers_wherever_it_is_imported_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, "", "rpc.spawn(main, 'count')")
    assert done.returncode == 1
    assert 'under `if __name__ == "__main__":`' in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert sum(-(-len(line) // 80) for line in done.stderr.splitlines()) < 24


OF_ITS_OWN = """
import multiprocessing, os, subprocess, sys, time
from farcall import rpc

class Number(int):
    pass

def plus(x):
    return Number(x + 1)

if __name__ == "__main__":
    def work(number):
        with multiprocessing.Pool(1) as pool:
            return pool.apply(abs, (int(rpc.rpc_sync("worker0", plus, args=(number,))),))

    def hang():
        child = os.fork()
        if child:
            program = subprocess.Popen(["sleep", "3600"])
            print(os.getpid(), child, program.pid, flush=True)
        time.sleep(3600)

    rpc.spawn(hang, workers=1) if "hang" in sys.argv else print(rpc.spawn(work, Number(-42), workers=1))
"""


def test_workers_of_a_package_run_its_functions_and_have_children(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(OF_ITS_OWN)
    done = run_program(tmp_path, "", "-m", "app")
    assert (done.returncode, done.stdout) == (0, "[41]\n"), done.stderr


@pytest.mark.nightly
def test_a_script_may_come_from_standard_input(tmp_path: Path) -> None:
    command = [sys.executable, "-"]
    done = subprocess.run(
        command, check=False, input=OF_ITS_OWN, capture_output=True, text=True, timeout=80, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "[41]\n"), done.stderr


@pytest.mark.parametrize("killed", [pytest.param("program", marks=pytest.mark.nightly), "worker"])
def test_children_of_workers_end_with_a_program_or_a_worker_that_is_killed(
    tmp_path: Path, killed: str
) -> None:
    (tmp_path / "program.py").write_text(OF_ITS_OWN)
    command = [sys.executable, "program.py", "hang"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        ends = [os.pidfd_open(pid) for pid in pids]
        os.kill(program.pid if killed == "program" else pids[0], signal.SIGKILL)
        _, errors = program.communicate(timeout=80)
    assert killed == "program" or ") was killed by SIGKILL" in errors.splitlines()[-1]
    assert len(ends) == 3
    for end in ends:
        assert select.select([end], [], [], SOON)[0]
        os.close(end)

"""Signals to ``farcall launch``, its grace, its output, and what becomes of workers without it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farcall.launch.rounds import SILENT_SECONDS
from tests.support.launchers import Launchers, launchers
from tests.support.leftovers import descendants

__all__ = ["launchers"]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parent.parent.parent.parent

SAVES = """
import os, signal, sys

def save(number, frame):
    os.write(1, f"saved at {signal.Signals(number).name}\\n".encode())
    sys.exit(0)

def note(number, frame):
    print("noted", signal.Signals(number).name)

signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, note)
signal.signal(signal.SIGUSR2, note)
print("ready")
while True:
    signal.pause()
"""

IS_PREEMPTED = """
import os, sys, time
import farcall

farcall.preempted()
print("ready")
while not farcall.preempted():
    time.sleep(0.02)
print("saved by start", os.environ["TORCHELASTIC_RESTART_COUNT"])
sys.exit(farcall.REQUEUE_STATUS)
"""

IGNORES = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready")
while True:
    signal.pause()
"""

LEAVES_A_CHILD = """
import os, signal, sys, time
if os.fork() == 0:
    if os.fork() == 0:
        print("grandchild", os.getpid())
        while True:
            signal.pause()
    os._exit(0)
os.wait()
print("ready", os.getpid())
while True:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("workers", "options", "number"), [(2, "--restart 3", signal.SIGUSR1), (1, "--dynamic", signal.SIGTERM)]
)
def test_a_preempted_job_saves_and_ends_with_the_status_to_be_requeued(
    launchers: Launchers, workers: int, options: str, number: signal.Signals
) -> None:
    launcher = launchers(IS_PREEMPTED, f"-n {workers} {options}")
    launcher.wait_for("ready", times=workers)
    launcher.send(number)
    assert launcher.end() == os.EX_TEMPFAIL
    assert launcher.said.count("saved by start 0") == workers


def test_lines_are_seen_at_once_signals_are_passed_on_and_workers_get_the_time_to_save(
    launchers: Launchers, tmp_path: Path
) -> None:
    launcher = launchers(SAVES, "-n 2 --log-dir logs")
    launcher.wait_for("[0] ready")  # while the program runs
    launcher.wait_for("[1] ready")
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        launcher.send(number)
        launcher.wait_for(f"noted {number.name}", times=2)
    launcher.send(signal.SIGTERM)
    assert launcher.end() == 128 + signal.SIGTERM
    assert (
        "farcall: ended by SIGTERM; ranks 0 to 1 still run here, to be ended in 30 s at most"
        in launcher.lines
    )
    assert {"[0] saved at SIGTERM", "[1] saved at SIGTERM"} <= {*launcher.lines}
    for rank in (0, 1):  # a file for each rank has the same lines
        text = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        assert text == "ready\nnoted SIGUSR1\nnoted SIGUSR2\nsaved at SIGTERM\n"


@pytest.mark.fresh_interpreter
def test_ctrl_c_while_the_interpreter_of_a_worker_starts_prints_no_traceback(
    launchers: Launchers, tmp_path: Path
) -> None:
    interrupts = (
        "import os, sys\nif 'farcall.launch.worker_main' in sys.orig_argv:\n    os.kill(os.getpid(), 2)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(interrupts)
    launcher = launchers("print('begun')", "-n 1", PYTHONPATH=str(tmp_path))
    assert launcher.end() == 128 + signal.SIGINT
    assert "Traceback" not in launcher.said
    assert "begun" not in launcher.said


@pytest.mark.parametrize("dynamic", ["", pytest.param("--dynamic", marks=pytest.mark.nightly)])
def test_a_worker_that_does_not_end_is_killed_after_the_grace_and_named(
    launchers: Launchers, dynamic: str
) -> None:
    launcher = launchers(IGNORES, f"-n 1 --grace 0.3 {dynamic}")
    launcher.wait_for("ready")
    launcher.send(signal.SIGTERM)
    assert launcher.end() == 128 + signal.SIGTERM
    assert "farcall: rank 0 still ran 0.3 s after SIGTERM (--grace): killed" in launcher.lines


def test_ctrl_c_shows_a_line_of_each_worker(launchers: Launchers) -> None:
    launcher = launchers("import signal\nprint('ready'); signal.pause()", "-n 2")
    launcher.wait_for("ready", times=2)
    launcher.send(signal.SIGINT)
    assert launcher.end() == 128 + signal.SIGINT
    said = {line for line in launcher.lines if line.startswith("[") and not line.endswith("ready")}
    assert said == {f"[{rank}] KeyboardInterrupt at program.py:2" for rank in (0, 1)}


ASKS = """
import os
from farcall import rpc

def ask(numbers):
    print("ready")
    while True:
        numbers.rpc_sync().append(1)

rank = os.environ["RANK"]
rpc.init_rpc(f"worker{rank}")
if rank == "0":
    rpc.rpc_sync("worker1", ask, args=(rpc.RRef([]),), timeout=0)
rpc.shutdown()
"""


def test_ctrl_c_says_nothing_of_calls_that_cannot_go_on(launchers: Launchers) -> None:
    launcher = launchers(ASKS, "-n 2")
    launcher.wait_for("ready")
    launcher.send(signal.SIGINT)
    assert launcher.end() == 128 + signal.SIGINT
    said = {line for line in launcher.lines if line.startswith("[") and not line.endswith("ready")}
    assert said <= {"[0] KeyboardInterrupt at program.py:13", "[1] KeyboardInterrupt at program.py:14"}


@pytest.mark.nightly
def test_a_second_ctrl_c_does_not_wait_for_the_grace(launchers: Launchers) -> None:
    launcher = launchers(IGNORES.replace("SIGTERM", "SIGINT"), "-n 1 --grace 600")
    launcher.wait_for("ready")
    launcher.send(signal.SIGINT)
    launcher.wait_for("ended by SIGINT")
    launcher.send(signal.SIGINT)
    assert launcher.end() == 128 + signal.SIGINT


def test_workers_of_a_killed_launcher_end_with_all_that_they_have_forked(launchers: Launchers) -> None:
    launcher = launchers(LEAVES_A_CHILD, "-n 2")
    launcher.wait_for("ready", times=2)
    launcher.wait_for("grandchild", times=2)
    launcher.send(signal.SIGKILL)
    assert launcher.end() == -signal.SIGKILL  # and the fixture waits for the rest to vanish


@pytest.mark.nightly
def test_workers_that_are_asked_to_outlive_their_launcher_do(launchers: Launchers, tmp_path: Path) -> None:
    launcher = launchers(SAVES, "-n 1 --outlive --log-dir logs")
    log = tmp_path / "logs" / "rank0.log"
    launcher.wait_for("run here")
    while "ready" not in (log.read_text() if log.exists() else ""):
        assert launcher.process.poll() is None, launcher.said
    launcher.send(signal.SIGKILL)
    launcher.process.wait()
    (worker,) = [each for each in descendants() if "worker_main" in each.command]
    os.kill(worker.pid, signal.SIGUSR1)
    while "noted SIGUSR1" not in log.read_text():
        assert worker in descendants()
    os.kill(worker.pid, signal.SIGTERM)


def test_a_full_disk_under_the_files_does_not_stop_the_job(launchers: Launchers, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").symlink_to("/dev/full")
    program = """
import os
print("line\\n" * 100_000)
print("done", 1 // int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
"""
    launcher = launchers(program, "-n 1 --restart 1 --log-dir logs")
    assert launcher.end() == 0
    assert "rank0.log any more: No space left on device. The workers run on" in launcher.said
    assert "[0] done" in launcher.said


@pytest.mark.nightly
def test_a_job_does_not_wait_for_processes_that_its_program_has_left(launchers: Launchers) -> None:
    program = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("no end of line", end="")
"""
    launcher = launchers(program, "-n 1")
    assert launcher.end() == 0
    assert launcher.lines[-1] == "[0] no end of line"
    (left,) = [each for each in descendants() if "signal.pause()" in each.command]
    left.kill()


# ---- process 1 of a container


AS_PROCESS_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture
def pid_namespace() -> None:
    """Skips the test where a PID namespace cannot be had."""
    if shutil.which("unshare") is None or subprocess.run([*AS_PROCESS_1, "true"], check=False).returncode:
        pytest.skip("PID namespaces cannot be made here")


@pytest.mark.usefixtures("pid_namespace")
def test_a_launcher_that_is_process_1_ends_at_sigterm(launchers: Launchers) -> None:
    launcher = launchers(SAVES, "-n 1", within=AS_PROCESS_1)
    launcher.wait_for("ready")
    (first,) = [
        each for each in descendants() if "farcall launch" in each.command and "unshare" not in each.command
    ]
    os.kill(first.pid, signal.SIGTERM)
    assert launcher.end() == 128 + signal.SIGTERM
    assert "[0] saved at SIGTERM" in launcher.lines


PROGRAM_AS_PROCESS_1 = """
import os, signal, sys
import rpc
if sys.argv[1:] == ["init"]:
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.AgentOptions(init_method="file:///tmp/meet"))
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


@pytest.mark.nightly
@pytest.mark.usefixtures("pid_namespace")
@pytest.mark.parametrize("command", [["program.py", "init"], ["-m", "farcall", "run", "program.py"]])
def test_a_program_that_is_process_1_ends_at_sigterm(command: list[str], tmp_path: Path) -> None:
    text = PROGRAM_AS_PROCESS_1.replace("/tmp/meet", str(tmp_path / "meet"))
    (tmp_path / "program.py").write_text(text)
    process = subprocess.Popen(
        [*AS_PROCESS_1, sys.executable, *command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        (first,) = [
            each for each in descendants() if "program.py" in each.command and "unshare" not in each.command
        ]
        os.kill(first.pid, signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


@pytest.mark.nightly
def test_a_launcher_that_was_stopped_goes_on(launchers: Launchers) -> None:
    launcher = launchers(SAVES, "-n 1")
    launcher.wait_for("ready")
    launcher.send(signal.SIGSTOP)
    time.sleep(SILENT_SECONDS + 1)  # what is tested is that so much time changes nothing
    launcher.send(signal.SIGCONT)
    launcher.send(signal.SIGUSR1)
    launcher.wait_for("noted SIGUSR1")
    launcher.send(signal.SIGTERM)
    assert launcher.end() == 128 + signal.SIGTERM
    assert "[0] saved at SIGTERM" in launcher.lines

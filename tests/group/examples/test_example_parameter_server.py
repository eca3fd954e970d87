"""The demo, run as a user runs it: it succeeds; if a worker dies, it ends at once and says which."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import leftovers
from tests.support.ports import reserved_port
from tests.support.workers import RunWorkers, Worker

__all__ = ["reserved_port"]

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "parameter_server.py"
FOREVER = ("--steps", "1000000")


class Demo:
    """A running demo, its output read line by line."""

    def __init__(self, *arguments: str, script: Path = SCRIPT, prefix: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *prefix, str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",  # it runs from anywhere
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            start_new_session=True,  # a terminal's Ctrl-C reaches the whole group
        )

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Reads until a line matches."""
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if match := re.search(pattern, line):
                return match
        pytest.fail(f"no line matched {pattern!r}:\n{''.join(seen)}\n{self.finish()[1]}")

    def wait_until_training(self) -> dict[str, int]:
        """Waits for the first updates; the process ids of the trainers."""
        pids = {}
        for _ in range(2):
            match = self.wait_for(r"^(trainer\d) on \S+, process (\d+)$")
            pids[match[1]] = int(match[2])
        self.wait_for(r"^trainer\d: [1-9]\d* of \d+, loss \d")
        return pids

    def finish(self) -> tuple[str, str]:
        """Waits for the end; the rest of standard output, and standard error."""
        return self.process.communicate(timeout=60)

    def worker_pid(self, rank: int) -> int:
        """The process of one worker that the demo has started; they are started by rank."""
        return worker_pids()[rank]


def worker_pids() -> list[int]:
    """The processes that ``rpc.spawn`` has started, in this order."""
    return sorted(each.pid for each in leftovers.descendants() if "spawn_main" in each.command)


@contextlib.contextmanager
def demo(*arguments: str, prefix: tuple[str, ...] = ()) -> Iterator[Demo]:
    """Starts the demo, and checks in the end that nothing of it is left, on disk or running."""
    with leftovers.nothing_left():
        running = Demo(*arguments, prefix=prefix)
        try:
            yield running
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
            running.finish()


def assert_success(output: str, trainers: int = 2) -> None:
    match = re.search(r"^accuracy +(\d\.\d+) on 449 images held out", output, re.MULTILINE)
    assert match, output
    assert float(match[1]) >= 0.95
    assert re.search(r"^updates per second +[\d,]+", output, re.MULTILINE)
    workers = ["server", *(f"trainer{index}" for index in range(trainers))]
    places = re.findall(
        rf"^(server|trainer\d) +{re.escape(socket.gethostname())}, process (\d+)", output, re.MULTILINE
    )
    assert [name for name, _ in places] == workers
    assert len({pid for _, pid in places}) == len(workers)


def test_it_trains_to_the_target_behind_progress_bars() -> None:
    with leftovers.nothing_left():
        master, slave = pty.openpty()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "120"}
        environment.pop("NO_COLOR", None)
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal's end
            while data := os.read(master, 65536):
                shown += data
        os.close(master)
        output = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "\n")
        assert process.wait() == 0, output
    assert re.search(r"trainer0 +━+ +1500/1500 loss 0\.\d+", output)
    assert re.search(r"trainer1 +━+ +1500/1500 loss 0\.\d+", output)
    assert_success(output)


@pytest.mark.nightly
def test_missing_the_target_is_a_failure_that_says_so() -> None:
    with demo("--steps", "1") as running:
        _, errors = running.finish()
        assert running.process.returncode == 1
    assert re.search(r"The accuracy is 0\.\d+; it should be 0\.95 at least", errors)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 2], ids=["server", "trainer1"])
def test_killing_a_worker_ends_it_and_names_the_worker(rank: int) -> None:
    name = "server" if rank == 0 else f"trainer{rank - 1}"
    with demo(*FOREVER) as running:
        running.wait_until_training()
        pid = running.worker_pid(rank)
        os.kill(pid, signal.SIGKILL)
        _, errors = running.finish()
        assert running.process.returncode == 1
    assert f"{name} (process {pid}) was killed by SIGKILL" in errors


@pytest.mark.parametrize(
    "send",
    [os.killpg, pytest.param(os.kill, marks=pytest.mark.nightly)],
    ids=["Ctrl-C at the terminal", "to the command"],
)
def test_ctrl_c_ends_it_quietly_and_its_workers_with_it(send: Callable[[int, int], None]) -> None:
    with demo(*FOREVER) as running:
        running.wait_until_training()
        send(running.process.pid, signal.SIGINT if send is os.killpg else signal.SIGTERM)
        _, errors = running.finish()
        assert running.process.returncode == 130
    assert "Traceback" not in errors


def by_hand(rank: int, port: int, *arguments: str) -> tuple[str, ...]:
    group = ("--world-size", "3", "--master-addr", "127.0.0.1", "--master-port", str(port))
    return ("--rank", str(rank), *group, *arguments)


@pytest.mark.nightly
def test_one_process_per_worker_by_hand(reserved_port: int) -> None:
    with contextlib.ExitStack() as stack:
        server, *trainers = [stack.enter_context(demo(*by_hand(rank, reserved_port))) for rank in range(3)]
        output, errors = server.finish()
        assert (server.process.returncode, errors) == (0, "")
        assert [trainer.finish() for trainer in trainers] == [("", "")] * 2
        assert [trainer.process.returncode for trainer in trainers] == [0, 0]
    assert_success(output)
    assert "trainer0: 1500 of 1500, loss " in output


@pytest.mark.nightly
def test_by_hand_the_others_name_a_worker_that_was_killed(reserved_port: int) -> None:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(demo(*by_hand(rank, reserved_port, *FOREVER))) for rank in range(3)]
        workers[0].wait_until_training()
        workers[2].process.kill()
        (_, server_errors), (_, trainer_errors) = workers[0].finish(), workers[1].finish()
        assert [worker.process.returncode for worker in workers[:2]] == [1, 1]
    assert "trainer1" in server_errors
    assert "trainer1" in trainer_errors or "'server'" in trainer_errors


@pytest.mark.nightly
def test_under_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    with demo(prefix=(*torchrun, "--log-dir", str(tmp_path))) as running:
        output, errors = running.finish()
        assert running.process.returncode == 0, errors
    assert_success(output)


WRONG = [
    (["--steps", "0"], "argument --steps: invalid positive value: '0'"),
    (["--rank", "3", "--world-size", "3", "--master-addr", "x"], "--rank needs a --world-size of 2 or more"),
    (["--rank", "2", "--world-size", "2"], "--rank needs a --world-size of 2 or more"),
    (["--rank", "0", "--world-size", "3"], "--rank needs a --master-addr"),
]


def refuse_arguments(_: Worker) -> list[str]:
    """In a worker, since starting the script takes a second."""
    sys.path.insert(0, str(SCRIPT.parent))
    said = []
    for arguments, _complaint in WRONG:
        sys.argv = ["parameter_server.py", *arguments]
        with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit, match="2"):
            importlib.import_module("parameter_server").main()
        said.append(errors.getvalue())
    return said


def test_wrong_arguments_are_refused(run_workers: RunWorkers) -> None:
    for errors, (_, complaint) in zip(run_workers(refuse_arguments, 1)[0], WRONG, strict=True):
        assert errors.startswith("usage: parameter_server.py")
        assert complaint in errors

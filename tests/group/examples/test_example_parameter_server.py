"""The demo, run as a user runs it: it succeeds; if a worker dies, it ends at once and says which."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import leftovers
from tests.support.commands import Command
from tests.support.ports import reserved_port
from tests.support.terminal import Terminal
from tests.support.workers import RunWorkers, Worker

__all__ = ["reserved_port"]

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "parameter_server.py"
FOREVER = ("--steps", "1000000")
SECONDS = 60.0


class Demo(Command):
    """A running demo."""

    def __init__(self, *arguments: str, prefix: tuple[str, ...] = ()) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, *prefix, str(SCRIPT), *arguments]
        # It runs from anywhere. A terminal's Ctrl-C reaches the whole group.
        super().__init__(command, Path("/"), os.environ | {"PYTHONPATH": path}, SECONDS, own_session=True)

    def wait_until_training(self) -> None:
        """Wait for the first updates of both trainers."""
        for index in range(2):
            self.wait_for(f"trainer{index}: ")

    def worker_pid(self, rank: int) -> int:
        """The process of one worker that the demo has started; they are started by rank."""
        return sorted(each.pid for each in leftovers.descendants() if "spawn_main" in each.command)[rank]


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
            running.process.wait()


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
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("NO_COLOR", None)
    with leftovers.nothing_left(), Terminal([sys.executable, str(SCRIPT)], 120, environment) as terminal:
        status = terminal.end(2 * SECONDS)
    output = "\n".join(terminal.lines)
    assert status == 0, output
    for index in range(2):
        assert re.search(rf"trainer{index} +━+ +1500/1500 loss 0\.\d+", output)
    assert_success(output)


@pytest.mark.nightly
def test_missing_the_target_is_a_failure_that_says_so() -> None:
    with demo("--steps", "1") as running:
        assert running.end() == 1
    assert re.search(r"The accuracy is 0\.\d+; it should be 0\.95 at least", running.said)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 2], ids=["server", "trainer1"])
def test_killing_a_worker_ends_it_and_names_the_worker(rank: int) -> None:
    name = "server" if rank == 0 else f"trainer{rank - 1}"
    with demo(*FOREVER) as running:
        running.wait_until_training()
        pid = running.worker_pid(rank)
        os.kill(pid, signal.SIGKILL)
        assert running.end() == 1
    assert f"{name} (process {pid}) was killed by SIGKILL" in running.said


@pytest.mark.parametrize(
    "send",
    [os.killpg, pytest.param(os.kill, marks=pytest.mark.nightly)],
    ids=["Ctrl-C at the terminal", "to the command"],
)
def test_ctrl_c_ends_it_quietly_and_its_workers_with_it(send: Callable[[int, int], None]) -> None:
    with demo(*FOREVER) as running:
        running.wait_until_training()
        send(running.process.pid, signal.SIGINT if send is os.killpg else signal.SIGTERM)
        assert running.end() == 130
    assert "Traceback" not in running.said


def by_hand(rank: int, port: int, *arguments: str) -> tuple[str, ...]:
    group = ("--world-size", "3", "--master-addr", "127.0.0.1", "--master-port", str(port))
    return ("--rank", str(rank), *group, *arguments)


@pytest.mark.nightly
def test_one_process_per_worker_by_hand(reserved_port: int) -> None:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(demo(*by_hand(rank, reserved_port))) for rank in range(3)]
        assert [worker.end() for worker in workers] == [0, 0, 0]
    assert [worker.said for worker in workers[1:]] == ["", ""]
    assert_success(workers[0].said)
    assert not re.search("warning|error|Traceback", workers[0].said, re.IGNORECASE)
    assert "trainer0: 1500 of 1500, loss " in workers[0].said


@pytest.mark.nightly
def test_by_hand_the_others_name_a_worker_that_was_killed(reserved_port: int) -> None:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(demo(*by_hand(rank, reserved_port, *FOREVER))) for rank in range(3)]
        workers[0].wait_until_training()
        workers[2].process.kill()
        assert [worker.end() for worker in workers[:2]] == [1, 1]
    assert re.search("^server: .*trainer1", workers[0].said, re.MULTILINE), workers[0].said
    assert "trainer1" in workers[1].said or "'server'" in workers[1].said


@pytest.mark.nightly
def test_under_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    with demo(prefix=(*torchrun, "--log-dir", str(tmp_path))) as running:
        assert running.end() == 0, running.said
    assert_success(running.said)


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

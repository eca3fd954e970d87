"""The programs of the guide's recipes, beside what other tests of examples show."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.group.examples.test_examples import EXAMPLES, take_part
from tests.support import leftovers
from tests.support.launchers import Launcher
from tests.support.workers import RunWorkers

pytestmark = pytest.mark.processes

LAUNCH = [sys.executable, "-m", "farcall", "launch", "-n", "3", "--dynamic", "--restart", "9"]
QUIET = {"FARCALL_LOG": "error", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ("interleaved", 4),
        *(
            pytest.param(schedule, steps, marks=pytest.mark.nightly)
            for schedule, steps in (("gpipe", 4), ("1f1b", 4), ("interleaved", 100))
        ),
    ],
)
def test_a_pipeline_by_a_schedule_learns_the_same(run_workers: RunWorkers, schedule: str, steps: int) -> None:
    arguments = ["--steps", str(steps), "--schedule", schedule]
    (status, said), (last_status, shown) = run_workers(take_part, 2, args=("pipeline_schedules", arguments))
    assert (status, said, last_status) == (None, "", None)
    assert re.search(
        rf"^largest difference +\d\.\de[-+]\d\d of the loss, over {steps} steps", shown, re.MULTILINE
    )


def killed(launcher: Launcher, name: str, starts: int) -> None:
    """Kill a worker that has been started so many times."""
    line = launcher.wait_for(f"{name} is process ", starts)
    number = re.search(r"is process (\d+)", line)
    assert number is not None
    os.kill(int(number[1]), signal.SIGKILL)


def test_a_trainer_without_a_server_ends_with_that_reason(tmp_path: Path) -> None:
    program = [str(EXAMPLES / "embeddings.py"), "--folder", str(tmp_path), "--patience", "0.5"]
    with leftovers.nothing_left():
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        trainer = Launcher([sys.executable, *program], tmp_path, QUIET | place)
        assert trainer.end() == 1
        del store
    assert trainer.lines[-1].startswith("trainer1: There is no server, and none has come for 0.5 s.")


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_copy_of_an_example_starts_its_workers_with_one_command(tmp_path: Path) -> None:
    copy = str(shutil.copy(EXAMPLES / "embeddings.py", tmp_path))
    with leftovers.nothing_left():
        launcher = Launcher([sys.executable, copy, "--steps", "1500"], tmp_path, QUIET)
        assert launcher.end() == 0, launcher.said
    error = re.search(r"error (\d\.\d\d) after 1500 steps", launcher.said)
    assert error is not None
    assert float(error[1]) < 0.2


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_elastic_training_goes_on_when_a_process_is_killed(tmp_path: Path) -> None:
    with leftovers.nothing_left():
        launcher = Launcher([sys.executable, str(EXAMPLES / "elastic_training.py")], tmp_path, QUIET)
        killed(launcher, "trainer2", 1)
        assert launcher.end() == 0, launcher.said
    assert launcher.said.count(": 2000 steps, accuracy 0.9") == 3


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_replicated_server_uses_each_gradient_once_though_it_is_killed(tmp_path: Path) -> None:
    with leftovers.nothing_left():
        program = [str(EXAMPLES / "replicated_server.py"), "--steps", "600", "--kills", "3"]
        launcher = Launcher([sys.executable, *program], tmp_path, QUIET)
        assert launcher.end() == 0, launcher.said
    assert launcher.said.count("the server has used 600 of 600 gradients") == 2
    assert launcher.said.count("kill -9") == 3


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_parameter_server_and_its_trainers_may_be_killed(tmp_path: Path) -> None:
    program = [str(EXAMPLES / "embeddings.py"), "--folder", str(tmp_path), "--steps", "1500", "--every", "50"]
    with leftovers.nothing_left():
        launcher = Launcher([*LAUNCH, *program], tmp_path, QUIET)
        launcher.wait_for("step 150,")
        killed(launcher, "server", 1)
        assert int(launcher.wait_for("server is process", 2).rpartition(" ")[2]) >= 150
        killed(launcher, "trainer1", 1)
        killed(launcher, "server", 2)
        killed(launcher, "trainer1", 2)
        assert launcher.end() == 0, launcher.said
        error = re.search(r"error (\d\.\d\d) after 1500 steps", launcher.said)
        assert error is not None
        assert float(error[1]) < 0.2
        late = Launcher([sys.executable, *program], tmp_path, QUIET | {"RANK": "1", "WORLD_SIZE": "3"})
        assert (late.end(), late.said) == (0, "the training is over")

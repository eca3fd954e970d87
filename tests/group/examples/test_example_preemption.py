"""Examples that are preempted save their state, end with the status to be requeued, and resume."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support import leftovers
from tests.support.launchers import Launcher

pytestmark = [pytest.mark.processes, pytest.mark.nightly, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
START_SECONDS = 250.0
"""Maximum time without a line: the processes of an example start one after the other."""

LAUNCH = [sys.executable, "-m", "farcall", "launch", "-n", "3"]


@pytest.mark.parametrize(
    ("command", "arguments", "shown", "number", "from_start", "after"),
    [
        (
            LAUNCH,
            "parameter_server.py --steps 2000",
            " of 2000, loss",
            signal.SIGTERM,
            " 4000 in ",
            "updates",
        ),
        (LAUNCH, "pipeline.py --passes 8", "passes: 1 of 8", signal.SIGTERM, " of 8,", "speed-up"),
        (
            [sys.executable],
            "elastic.py --steps 1000 --kill-every 300",
            "steps: ",
            signal.SIGUSR1,
            " of 1000,",
            "accuracy",
        ),
        (LAUNCH, "fsdp.py --workers 2 --steps 14", "[0] 1 ", signal.SIGTERM, "[0] 1 ", "[0] 13 "),
    ],
    ids=["parameter server", "pipeline", "elastic", "fsdp"],
)
def test_a_preempted_example_saves_and_resumes(
    command: list[str],
    arguments: str,
    shown: str,
    number: signal.Signals,
    from_start: str,
    after: str,
    tmp_path: Path,
) -> None:
    name, *options = arguments.split()
    state = ["--folder", str(tmp_path)] if name == "fsdp.py" else ["--plain", "--checkpoint", "state"]
    run = [*command, str(EXAMPLES / name), *options, *state]
    environment = {"FARCALL_LOG": "error", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with leftovers.nothing_left(), contextlib.ExitStack() as ending:
        first = Launcher(run, tmp_path, environment, START_SECONDS)
        ending.callback(first.process.kill)
        first.wait_for(shown)
        first.send(number)
        assert first.end() == os.EX_TEMPFAIL, first.said
        assert "The job is preempted." in first.said
        second = Launcher(run, tmp_path, environment, START_SECONDS)
        ending.callback(second.process.kill)
        assert second.end() == 0, second.said
        assert after in second.said
        assert from_start not in second.said  # it continues

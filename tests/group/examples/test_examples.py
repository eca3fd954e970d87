"""The examples, in short: each reaches what it is to show, or ends with an error that says what is missing.

Their workers are forked from a process that has PyTorch loaded, except where it is about starting them.
``parameter_server.py``, which shows everything about starting and ending, has tests of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.workers import RunWorkers, Worker

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


class Example(NamedTuple):
    """How an example is run.

    Attributes:
        workers: how many it has.
        short: arguments with which it succeeds soon.
        shows: a line that it then prints.
        too_short: arguments with which it misses what it is to show.
        misses: what it then says.
    """

    workers: int
    short: list[str]
    shows: str
    too_short: list[str]
    misses: str


LIST = {
    "batching": Example(
        3,
        ["--requests", "400", "--rounds", "2", "--target", "0"],  # no speed-up is certain on a loaded machine
        r"^speed-up +\d+\.\d\d",
        ["--requests", "40", "--rounds", "1", "--steps", "1"],
        r"The accuracy is 0\.\d+; it should be 0\.9 at least",
    ),
    "reinforcement": Example(
        3,
        [],
        r"^poles stand for +1[89]\d of 200 steps",
        ["--rounds", "1"],
        r"The poles stand for \d+ steps; it should be 180 at least",
    ),
    "pipeline": Example(
        3,
        ["--passes", "12", "--width", "256", "--batch", "320"],
        r"^micro-batches +0\.9\d+ accuracy in",
        ["--passes", "1", "--width", "32"],
        r"The accuracy with whole batches is 0\.\d+; it should be 0\.93 at least",
    ),
    "rnn": Example(
        2,
        ["--steps", "100", "--vocabulary", "1000"],
        r"^perplexity +\d+ on text held out",
        ["--steps", "1", "--vocabulary", "100"],
        r"The perplexity is \d+; it should be \d+ at most",
    ),
    "hybrid": Example(
        3,
        [],
        r"^dense parts +equal on both trainers",
        ["--passes", "1", "--learning-rate", "0.0001"],
        r"The accuracy is 0\.\d+; it should be 0\.9 at least",
    ),
    "tensor_parallel": Example(
        4,
        ["--steps", "8"],
        r"^largest difference +\d\.\de-\d\d of the loss, over 8 steps",
        ["--steps", "8", "--tolerance", "0"],
        r"The losses differ by \d\.\de-\d\d; it should be 0 at most",
    ),
}


def take_part(worker: Worker, name: str, arguments: list[str]) -> tuple[str | int | None, str]:
    """One worker of an example: how it ends, and what it prints."""
    sys.path.insert(0, str(EXAMPLES))
    place = ["--rank", worker.rank, "--world-size", worker.world_size, "--init-method", worker.init_method]
    sys.argv = [name, *arguments, *map(str, place)]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            importlib.import_module(name).main()
        except SystemExit as end:
            return end.code, output.getvalue()
    return None, output.getvalue()


@pytest.mark.parametrize("name", LIST)
def test_it_reaches_what_it_is_to_show(run_workers: RunWorkers, name: str) -> None:
    example = LIST[name]
    results = run_workers(take_part, example.workers, args=(name, example.short), time_limit=80)
    assert [status for status, _ in results] == [None] * example.workers
    assert re.search(example.shows, results[0][1], re.MULTILINE), results[0][1]
    assert [output for _, output in results[1:]] == [""] * (example.workers - 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--sequence-parallel", "--loss-parallel"],
        pytest.param(["--sequence-parallel"], marks=pytest.mark.nightly),
        pytest.param(["--loss-parallel"], marks=pytest.mark.nightly),
        pytest.param(["--dp", "1", "--tp", "4", "--sequence-parallel"], marks=pytest.mark.nightly),
        pytest.param(["--dp", "4", "--tp", "1", "--loss-parallel"], marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def test_a_model_cut_in_other_ways_learns_the_same(run_workers: RunWorkers, arguments: list[str]) -> None:
    example = LIST["tensor_parallel"]
    results = run_workers(take_part, 4, args=("tensor_parallel", [*example.short, *arguments]), time_limit=80)
    assert [status for status, _ in results] == [None] * 4
    assert re.search(example.shows, results[0][1], re.MULTILINE), results[0][1]


def test_a_model_behind_one_handle_learns_the_same_and_writes(run_workers: RunWorkers) -> None:
    arguments = ["--served", "--steps", "4"]
    results = run_workers(take_part, 3, args=("tensor_parallel", arguments), time_limit=80)
    assert [status for status, _ in results] == [None] * 3
    shown = results[0][1]
    assert re.search(
        r"^largest difference +(\d\.\de-\d\d|0\.0e\+00) of the loss, over 4 steps", shown, re.MULTILINE
    )
    assert re.search("^it writes +['\"]", shown, re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LIST)
def test_missing_it_is_a_failure_that_says_so(run_workers: RunWorkers, name: str) -> None:
    example = LIST[name]
    results = run_workers(take_part, example.workers, args=(name, example.too_short))
    complaint = results[0][0]
    assert isinstance(complaint, str)  # with which the process ends, with status 1
    assert re.search(example.misses, complaint)
    assert [status for status, _ in results[1:]] == [None] * (example.workers - 1)


def test_every_example_is_tested() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py") if os.access(path, os.X_OK)}
    assert scripts == {
        *LIST,
        *BY_ONE_DRIVER,
        "parameter_server",
        "embeddings",
        "pipeline_schedules",
        "elastic_training",
        "replicated_server",
    }


# ---- started by one command, as a user does


def start(name: str, *arguments: str, launcher: Sequence[str] = (), **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",  # they run from anywhere
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *sys.path]), **env},
        start_new_session=True,
    )


BY_ONE_DRIVER = {
    "spmd_training": (
        ["--model", "language", "--cut", "both", "--steps", "3", "--workers", "2"],
        r"^language, both +loss \d",
    ),
    "fsdp": (["--steps", "8", "--every", "3"], r"^resumed at +step [14], with 2 workers"),
    "elastic": (
        ["--steps", "1200", "--kill-every", "300"],
        r"^trainers +6 were started, 3 of which replaced",
    ),
    "serve": (
        ["--rounds", "1", "--clients", "4", "--width", "256"],
        r"^accuracy +0\.9\d\d of 449 images[^!]*^new version +\d+ images answered by the first",
    ),
}
"""Arguments with which those succeed soon that start workers for one program, and a line that they print.

That which is killed may have been at its last checkpoint just then, and goes on from the one before.
"""


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name",
    [
        "serve",
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ("elastic", "spmd_training", "fsdp")),
    ],
)
def test_one_program_on_many_workers_computes_what_it_does_alone(name: str, tmp_path: Path) -> None:
    arguments, shows = BY_ONE_DRIVER[name]
    process = start(name, *arguments, TMPDIR=str(tmp_path))
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert re.search(shows, output, re.MULTILINE), output


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.processes
@pytest.mark.parametrize(
    "launcher", [pytest.param((), marks=pytest.mark.nightly), TORCHRUN], ids=["one command", "torchrun"]
)
def test_a_model_is_cut_over_processes_started_by(launcher: Sequence[str], tmp_path: Path) -> None:
    two = ["--dp", "1", "--tp", "2"] if launcher else []
    process = start("tensor_parallel", "--steps", "4", *two, launcher=launcher, TMPDIR=str(tmp_path))
    output, errors = process.communicate(timeout=80)
    assert process.returncode == 0, errors
    assert "steps: 4 of 4, loss" in output
    assert "over 4 steps" in output

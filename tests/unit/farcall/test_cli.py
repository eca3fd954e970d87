"""The command ``farcall``: its options, and what ``farcall env`` tells."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch

import farcall
from farcall.cli import main
from farcall.doctor import Finding
from farcall.launch.job import Job, under_slurm
from farcall.trials import Trial, pytorch
from tests.support.workers import RunWorkers, Worker


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--version"], 0, f"farcall {farcall.__version__}\n"),
        ([], 2, "COMMAND"),
        (["env"], 0, "TCP sockets on loopback"),
        (["completion", "bash"], 0, "_FARCALL_COMPLETE=bash_complete"),
        (["launch", "-n", "2", "--nnodes", "2", "train.py"], 2, "--rdzv HOST:PORT"),
    ],
)
def test_what_is_asked_for_is_printed(
    arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    assert said in "".join(capsys.readouterr())


def test_each_command_is_explained_in_a_line_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.partition("Commands:")[2].splitlines()
    assert len(lines) > 5
    assert [line for line in lines if line.endswith("...") or len(line) > 80] == []


def test_env_says_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["farcall"] == farcall.__version__
    assert facts["TCP sockets on loopback"] == facts["Unix sockets"] == "work"
    assert facts.keys() >= {"python", "torch", "uvloop", "event loop", "platform", "cpus", "accelerators"}


def test_env_keeps_secrets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_TOKEN", "s3cret")
    monkeypatch.setenv("FARCALL_COLOUR", "blue")
    main(["env", "--json"])
    printed = capsys.readouterr().out
    assert "s3cret" not in printed
    assert json.loads(printed)["FARCALL_TOKEN"] == "is set"
    assert json.loads(printed)["FARCALL_COLOUR"] == "blue"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("launch -n 1 --nnodes 2 --rdzv host0:http train.py", "'host0:http' is not HOST:PORT"),
        ("launch -n 1 --nnodes 2 --rdzv :29500 train.py", "':29500' is not HOST:PORT"),
        (
            "launch -n 1 --nnodes 2 --rdzv host0 --node-rank 2 train.py",
            "--node-rank is from 0 to 1",
        ),
        ("launch -n 1 --dynamic --rdzv host0 train.py", "--dynamic needs --node-rank"),
        ("launch -n 1 --dynamic --node-rank 1 train.py", "--rdzv HOST:PORT"),
        ("launch -n 1 --spares 1 train.py", "--spares needs --dynamic and --restart"),
        (
            "launch -n 1 --dynamic --restart 1 --spares 1 --outlive --log-dir x train.py",
            "--spares cannot be used with --outlive",
        ),
        ("launch -n 2 --replica 2 train.py", "--replica needs --dynamic"),
        ("launch -n 3 --dynamic --replica 2 train.py", "needs a multiple of 2 workers"),
        ("launch -n 2 nowhere.py", "there is no file /"),
        ("launch -n 2 --nodes 2 train.py", "No such option '--nodes'"),
        ("run --lend train.py", "No such option '--lend'"),
        ("doctor --meet host0:70000", "'host0:70000' is not HOST:PORT"),
        ("doctor --meet host0 --seconds -1", "-1.0 is not in the range"),
    ],
)
def test_what_is_mistyped_is_said_at_once(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    assert said in capsys.readouterr().err


def run_doctor(_: Worker) -> int:
    """In a process of its own, which has no device of SPMD mode yet."""
    return main(["doctor"])


def test_doctor_finds_this_machine_fit_and_tries_each_part(run_workers: RunWorkers) -> None:
    doctor = run_workers.start(run_doctor, time_limit=80)[0]
    assert doctor.result() == 0
    lines = re.sub(r"\(\d+\.\d s\)", "(...)", doctor.log.read_text()).splitlines()
    said = [line for line in lines if line[:4] in ("ok  ", "..  ", "--  ", "!!  ")]  # and not the log
    parts = (
        *("calls", "calls over gRPC", "process groups"),
        *("SPMD mode, with one worker", "tensor-parallel layers"),
    )
    assert said[said.index("..  importing PyTorch and farcall") + 1 :] == [
        f"ok  PyTorch: {torch.__version__}",
        "ok  accelerators: none, so tensors stay on the CPU",
        *(line for part in parts for line in (f"..  trying {part}", f"ok  {part}: work (...)")),
    ]
    assert "ok  TCP sockets on loopback: work" in said
    assert "ok  Unix sockets: work" in said


def test_what_does_not_work_is_said_with_its_reason() -> None:
    def fail() -> None:
        raise RuntimeError("no such thing\nat line 3")

    found = Trial("groups", fail).run()
    assert found.is_wrong
    assert str(found).startswith("!!  groups: no: RuntimeError: no such thing. Run ")


def test_a_feature_that_is_not_installed_is_no_fault() -> None:
    found = Trial("clouds", pytest.fail, "farcall_clouds", "For this: pip install clouds.").run()
    assert not found.is_wrong
    assert str(found) == "--  clouds: not installed. For this: pip install clouds."


def test_trials_are_not_part_of_the_job_that_the_command_runs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "7")
    seen = []
    Trial("groups", lambda: seen.append(os.environ.get("WORLD_SIZE"))).run()
    assert (seen, os.environ["WORLD_SIZE"]) == ([None], "7")


@pytest.mark.parametrize(
    ("version", "said"),
    [("2.12.1", "!!  PyTorch: 2.12.1. Install PyTorch 2.13"), ("2.16.0a0", "up to 2.15"), ("2.14.1", "ok")],
)
def test_versions_of_pytorch_that_were_not_tested_are_named(
    version: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert said in str(pytorch())


def test_a_finding_ends_in_one_full_stop_before_what_to_do() -> None:
    assert str(Finding("meeting", "nobody came", "Start it.")) == "!!  meeting: nobody came. Start it."
    assert str(Finding("meeting", "Nobody came.", "Start it.")) == "!!  meeting: Nobody came. Start it."


SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "node[01-03]",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "node[02-03]",
    "SLURM_NODEID": "1",
}


def test_slurms_step_says_where_the_machines_meet() -> None:
    assert under_slurm(4, SLURM, nodes=None, name=None) == Job(4, 2, 1, "node02:29715", name="slurm-12.2")
    assert under_slurm(4, {}, nodes=2, rdzv="a:1") == Job(4, 2, None, "a:1")


def test_a_step_on_one_node_is_a_job_of_one_machine() -> None:
    step = SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "node02"}
    assert under_slurm(4, step) == Job(4)


def test_steps_of_one_job_meet_at_ports_of_their_own() -> None:
    assert under_slurm(1, SLURM).rdzv != under_slurm(1, SLURM | {"SLURM_STEP_ID": "3"}).rdzv


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "step 12.2 of Slurm runs 4 launchers on 2 nodes"),
        ({"SLURM_STEP_ID": ""}, "one of the 3 nodes of Slurm's job 12, in no step"),
    ],
)
def test_what_cannot_be_under_slurm_is_refused_by_name(
    changed: dict[str, str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (SLURM | changed).items():
        monkeypatch.setenv(name, value)
    for name, value in changed.items():
        if not value:
            monkeypatch.delenv(name)
    assert main(["launch", "-n", "1", __file__]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("launch x.py -n 2", "launch -n 2 x.py"),
        ("launch x.py --lr 1 -n2", "launch -n2 x.py --lr 1"),
        ("launch --restart 3 x.py --workers=4", "launch --workers=4 --restart 3 x.py"),
        ("launch -n 2 python x.py", "launch -n 2 x.py"),
        ("launch -n 2 /usr/bin/python3.11 -m trainer 1", "launch -n 2 -m trainer 1"),
        ("launch -n 2 python3", "launch -n 2 PROGRAM"),
        ("run python x.py", "run x.py"),
    ],
)
def test_a_command_line_in_another_order_is_answered_with_the_one_that_was_meant(
    given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given.split()) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f": farcall {meant}")


def test_a_command_line_without_a_required_option_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "x.py", "--lr", "1"]) == 2
    assert "Missing option '-n'" in capsys.readouterr().err

"""The output that a launcher keeps: by worker, by time, and as it grows."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from farcall.cli import main
from farcall.launch.output import Output
from farcall.observe.reading.kept_output import KeptOutput, LogTimes
from farcall.observe.reading.launches import note_end, note_launch
from farcall.observe.reading.state import WorkerState

WORKERS = [WorkerState(None, {"worker": {"name": name, "rank": rank}}) for rank, name in enumerate("ab")]


@pytest.fixture
def output(tmp_path: Path) -> KeptOutput:
    note_launch(tmp_path / "job", log_dir=str(tmp_path))
    return KeptOutput(tmp_path / "job")


def append(folder: Path, rank: int, text: str) -> None:
    with open(folder / f"rank{rank}.log", "a") as file:
        file.write(text)


def test_lines_of_several_workers_are_in_the_order_of_printing(
    tmp_path: Path, output: KeptOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
    times = [LogTimes(log) for log in logs]
    for now, (rank, text) in enumerate([(1, "1\n"), (0, "2\n3\n"), (1, "4\n"), (0, "5\n")]):
        monkeypatch.setattr(time, "time", lambda now=now: 100.0 + now)
        times[rank].note(logs[rank].stat().st_size if logs[rank].exists() else 0)
        append(tmp_path, rank, text)
    assert output.last_by_time(WORKERS, 9) == ["b  1", "a  2", "a  3", "b  4", "a  5"]
    assert output.last_by_time(WORKERS, 2) == ["b  4", "a  5"]
    assert list(output.last_of_each(WORKERS, 1)) == ["a  5", "b  4"]


def test_new_lines_are_shown_once_and_when_they_are_whole(tmp_path: Path, output: KeptOutput) -> None:
    append(tmp_path, 0, "1\n")
    assert output.last_by_time(WORKERS[:1], 9) == ["a  1"]
    append(tmp_path, 0, "2\n3")
    append(tmp_path, 1, "from one that has come later\n")
    assert list(output.new(WORKERS)) == ["a  2", "b  from one that has come later"]
    append(tmp_path, 0, "4\n")
    assert list(output.new(WORKERS)) == ["a  34"]
    assert list(output.new(WORKERS)) == []
    (tmp_path / "rank0.log").write_text("5\n")
    assert list(output.new(WORKERS)) == ["a  5"]


def test_damaged_times_are_survived(tmp_path: Path, output: KeptOutput) -> None:
    append(tmp_path, 0, "1\n2\n")
    (tmp_path / "rank0.times").write_bytes(b"\xff" * 39)
    assert output.last_by_time(WORKERS[:1], 9) == ["a  1", "a  2"]


@pytest.mark.processes
def test_a_launcher_notes_when_it_writes(tmp_path: Path, output: KeptOutput) -> None:
    written = Output(tmp_path)
    for rank in (1, 0):
        command = [sys.executable, "-c", f"print({rank})"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            pipes = written.follow(rank, process)
        written.ended(pipes)
    written.close()
    assert written.closed.wait(60)
    assert all((tmp_path / f"rank{rank}.times").stat().st_size == 16 for rank in range(2))


def test_following_ends_with_the_job(
    tmp_path: Path, output: KeptOutput, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARCALL_JOBS_DIR", str(tmp_path))
    note_end(tmp_path / "job", 0, "")
    assert main(["logs", "--job", "job", "-f"]) == 0
    assert capsys.readouterr().out == ""

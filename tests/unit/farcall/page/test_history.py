"""Jobs of the past in their SQLite file."""

from __future__ import annotations

import math
import os
import sqlite3
from dataclasses import replace
from pathlib import Path

from farcall.page.history import FILE, MAX_JOBS, MAX_POINTS, History, PastJob

JOB = PastJob("a", "train.py", "here", 100.0, 200.0, 4, "running", "")
NOW = 300.0


def test_job_is_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.record(JOB, [(150.0, 1.0, 2.0, 0.5, 1000)])
    history.record(replace(JOB, state="dead", why="culprit: worker1"), [(160.0, 3.0, 4.0, 0.7, 2000)])
    history.close()
    again = History(tmp_path)
    assert again.jobs() == [replace(JOB, state="dead", why="culprit: worker1")]
    assert again.points("a") == [(150.0, 1.0, 2.0, 0.5, 1000), (160.0, 3.0, 4.0, 0.7, 2000)]
    again.close()
    assert os.stat(tmp_path / FILE).st_mode & 0o777 == 0o600


def test_old_jobs_go_with_their_points(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.record(JOB, [(150.0, 1.0, 2.0, 0.5, 1000)])
    history.prune(now=JOB.seen + 31 * 86400.0)
    assert history.jobs() == []
    assert history.points("a") == []
    history.close()


def test_jobs_and_points_are_bounded(tmp_path: Path) -> None:
    history = History(tmp_path)
    for n in range(MAX_JOBS + 5):
        history.record(replace(JOB, id=str(n), seen=float(n)))
    history.prune(now=NOW)
    assert len(history.jobs()) == MAX_JOBS
    assert history.jobs()[0].id == str(MAX_JOBS + 4)
    history.record(JOB, [(float(n), 0.0, 0.0, 0.0, 0) for n in range(MAX_POINTS + 1)])
    kept = history.points("a")
    assert len(kept) <= MAX_POINTS
    assert (kept[0][0], kept[-1][0]) == (0.0, float(MAX_POINTS))
    history.record(replace(JOB, why="x" * 10**6))
    assert len(next(each for each in history.jobs() if each.id == "a").why) == 4000
    history.close()


def test_folder_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    history = History(tmp_path)
    assert history.trouble == ""
    history.close()
    assert os.stat(tmp_path).st_mode & 0o777 == 0o755
    history = History(tmp_path / "new")
    history.close()
    assert os.stat(tmp_path / "new").st_mode & 0o777 == 0o700


def test_folder_that_others_can_write_to_has_no_history(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    history = History(tmp_path)
    assert "other users can write" in history.trouble
    assert not (tmp_path / FILE).exists()
    tmp_path.chmod(0o1777)
    history = History(tmp_path)
    assert history.trouble == ""
    history.close()


def test_numbers_that_sqlite_cannot_hold_end_no_history(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.record(replace(JOB, seen=math.nan), [(150.0, math.inf, 0.0, 0.0, 1 << 70)])
    assert history.trouble == ""
    assert [each.seen for each in history.jobs()] == [0.0]
    assert history.points("a") == [(150.0, 0.0, 0.0, 0.0, (1 << 63) - 1)]
    history.close()


def test_damaged_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database at all" * 100)
    history = History(tmp_path)
    history.record(JOB)
    assert [each.id for each in history.jobs()] == ["a"]
    history.close()


def test_file_of_another_version_is_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    history = History(tmp_path)
    assert "version 99" in history.trouble
    history.record(JOB)
    assert history.jobs() == []


def test_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / FILE).symlink_to("/dev/null")
    history = History(tmp_path)
    assert FILE in history.trouble
    assert history.jobs() == []

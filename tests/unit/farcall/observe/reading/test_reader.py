"""Reading the files of a job: what is foreign or damaged is named and skipped, texts are made fit to show."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from farcall.observe.format.job_files import write_private
from farcall.observe.format.jobs import JobFolder, find_job, jobs, make_private, remove_old
from farcall.observe.format.layout import MAX_FILE_BYTES, Beat
from farcall.observe.format.orders import give_order
from farcall.observe.reading import reader
from farcall.observe.reading.kept_output import KeptOutput
from farcall.observe.reading.launches import note_launch
from farcall.observe.reading.reader import read_job
from farcall.observe.worker.state_file import StateFile
from farcall.page.token_file import page_token
from rpc.runtime.process_signs import process_signs


def write(folder: Path, job: str, file: str, **facts: Any) -> Path:
    path = folder / job / f"{file}.state"
    state = StateFile(path)
    wall = facts.pop("wall", 1.0)
    state.snapshot({"worker": facts, "monotonic": 1.0})
    state.beat(Beat(1, 1.0, wall, 0, 0, 0.0))
    return path


def job_at(folder: Path, job: str) -> JobFolder:
    return find_job(folder, job)


def test_workers_are_read_by_rank(tmp_path: Path) -> None:
    write(tmp_path, "j", "b", name="worker1", rank=1)
    write(tmp_path, "j", "a", name="worker0", rank=0)
    assert [each.name for each in read_job(job_at(tmp_path, "j"))] == ["worker0", "worker1"]


def test_worker_that_was_started_again_counts_once(tmp_path: Path) -> None:
    write(tmp_path, "j", "b", name="w", rank=0, pid=1, wall=5.0)
    write(tmp_path, "j", "a", name="w", rank=0, pid=2, wall=9.0)
    assert [each.pid for each in read_job(job_at(tmp_path, "j"))] == [2]


def test_damaged_and_foreign_files_are_named(tmp_path: Path) -> None:
    write(tmp_path, "j", "good", name="w", rank=0)
    (tmp_path / "j" / "empty.state").touch()
    (tmp_path / "j" / "large.state").write_bytes(b"FARCALLS" + bytes(MAX_FILE_BYTES))
    os.mkfifo(tmp_path / "j" / "fifo.state")
    (tmp_path / "j" / "link.state").symlink_to("/etc/passwd")
    (tmp_path / "j" / "folder.state").mkdir()
    StateFile(tmp_path / "j" / "none.state").beat(Beat(1, 1.0, 1.0, 0, 0, 0.0))
    found = read_job(job_at(tmp_path, "j"))
    assert [each.name for each in found] == ["w"]
    assert dict(found.skipped).keys() == {
        "empty.state",
        "large.state",
        "fifo.state",
        "folder.state",
        "link.state",
        "none.state",
    }
    assert all(why for _, why in found.skipped)


def test_reading_what_is_no_file_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "j" / "folder.state").mkdir(parents=True)
    before = os.listdir("/proc/self/fd")
    read_job(job_at(tmp_path, "j"))
    assert os.listdir("/proc/self/fd") == before


def test_control_characters_are_escaped(tmp_path: Path) -> None:
    write(tmp_path, "j", "a", name="x\x1b[2J\n", rank=0)
    (worker,) = read_job(job_at(tmp_path, "j"))
    assert worker.name == "x\\x1b[2J\\n"


def test_process_of_the_same_number_is_not_the_worker(tmp_path: Path) -> None:
    signs = process_signs(os.getpid())
    assert signs is not None
    mine = {"pid": os.getpid(), "host": socket.gethostname()}
    write(tmp_path, "j", "a", name="living", rank=0, start=signs.start, **mine)
    write(tmp_path, "j", "b", name="other", rank=1, start=signs.start - 1, **mine)
    living, other = read_job(job_at(tmp_path, "j"))
    assert living.process.alive is True
    assert other.is_dead


def test_newest_job_is_found(tmp_path: Path) -> None:
    for at, job in ((100, "aa1"), (300, "bb2"), (200, "aa3")):
        path = write(tmp_path, job, "w", name="w")
        os.utime(path, (at, at))
        os.utime(path.parent, (at, at))
    assert find_job(tmp_path, None).id == "bb2"
    assert find_job(tmp_path, "bb").id == "bb2"
    with pytest.raises(LookupError, match="several jobs begin with 'aa'"):
        find_job(tmp_path, "aa")
    with pytest.raises(LookupError, match=r"no job 'x'.* newest is bb2"):
        find_job(tmp_path, "x")
    with pytest.raises(LookupError, match="no job of this user"):
        find_job(tmp_path / "none", None)


def test_old_jobs_are_removed(tmp_path: Path) -> None:
    now = 10_000_000.0
    for job, age in (("old", 8 * 86400), ("kept", 8 * 86400), ("new", 86400)):
        path = write(tmp_path, job, "w", name="w")
        os.utime(path, (now - age, now - age))
        os.utime(path.parent, (now - age, now - age))
    assert remove_old(tmp_path, "kept", now) == ["old"]
    assert {job.id for job in jobs(tmp_path)} == {"kept", "new"}


def test_folder_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(PermissionError):
        make_private(tmp_path / "link")
    make_private(tmp_path / "target")
    assert os.stat(tmp_path / "target").st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of another user")
def test_job_of_another_user_is_none(tmp_path: Path) -> None:
    write(tmp_path, "mine", "w", name="w")
    path = write(tmp_path, "other", "w", name="w")
    for each in (path.parent, path):
        os.chown(each, 65534, 65534)
    assert find_job(tmp_path, None).id == "mine"
    with pytest.raises(LookupError, match="no job 'other'"):
        find_job(tmp_path, "other")
    with pytest.raises(PermissionError, match="not a folder of this user"):
        write_private(path.parent / "metrics.token", b"a token")
    assert not (path.parent / "metrics.token").exists()
    assert remove_old(tmp_path, "mine", time.time() + 1e9) == []


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
def test_job_to_which_others_can_write_is_none(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path, "open", "w", name="w")
    path.parent.chmod(mode)
    (tmp_path / "link").symlink_to(path.parent)
    with pytest.raises(LookupError, match="no job of this user"):
        find_job(tmp_path, None)
    with pytest.raises(PermissionError, match=f"other users can write to .*mode {mode:o}"):
        give_order(path.parent, "count")
    with pytest.raises(PermissionError):
        page_token(path.parent)


def test_private_file_replaces_what_is_there_and_writes_into_no_other(tmp_path: Path) -> None:
    folder, outside = tmp_path / "job", tmp_path / "outside"
    make_private(folder)
    outside.write_text("unchanged")
    for make in (os.symlink, os.link):
        make(outside, folder / "token")
        write_private(folder / "token", b"a token")
        assert (folder / "token").read_bytes() == b"a token"
        assert os.stat(folder / "token").st_mode & 0o777 == 0o600
        assert outside.read_text() == "unchanged"
        (folder / "token").unlink()
    assert list(folder.iterdir()) == []


def test_what_a_killed_writer_has_left_is_replaced(tmp_path: Path) -> None:
    """The only writer of a file has only one other name for it, which is no name of a state file."""
    folder = tmp_path / "job"
    make_private(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", lambda *_, **__: None)  # as if it were killed before it
        for _ in range(2):
            write_private(folder / "w.state", b"a", is_only_writer=True)
    (left,) = folder.iterdir()
    assert not left.name.endswith(".state")
    write_private(folder / "w.state", b"b", is_only_writer=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"w.state": b"b"}


def test_output_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank0.log")
    note_launch(tmp_path / "j", log_dir=str(tmp_path))
    write(tmp_path, "j", "w", name="w", rank=0)
    (worker,) = read_job(job_at(tmp_path, "j"))
    assert list(KeptOutput(tmp_path / "j").last_of_each([worker], 5)) == [
        f"w: {tmp_path / 'rank0.log'}: it is not a regular file"
    ]


@pytest.mark.parametrize(
    ("waited", "looks", "asked"), [(0.0, False, 1), (0.14, False, 0), (None, False, 0), (0.0, True, 0)]
)
def test_silent_process_that_may_wait_for_a_core_or_cannot_write_is_not_asked_for_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited: float | None, looks: bool, asked: int
) -> None:
    """Its interpreter may run while they are written, which can end it by SIGSEGV."""
    waits: list[dict[str, float]] = [{}, {}] if waited is None else [{"7": 1.0}, {"7": 1.0 + waited}]
    calls: list[Any] = []
    monkeypatch.setattr(reader, "core_waits", lambda _: waits.pop(0))
    monkeypatch.setattr(reader, "ask_for_stacks", lambda *given: calls.append(given))
    signs = process_signs(os.getpid())
    assert signs is not None
    facts: dict[str, Any] = {"pid": os.getpid(), "start": signs.start, "host": socket.gethostname()}
    path = write(tmp_path, "j", "a", name="w", rank=0, signal=61, observer=7, **facts)
    if not looks:
        os.utime(path, (1.0, 1.0))
    (found,) = read_job(job_at(tmp_path, "j"))
    assert found.process.alive
    assert len(calls) == asked

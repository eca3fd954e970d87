"""What an observer writes of the threads of its process."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farcall.observe.format.job_files import write_private
from farcall.observe.reading.reader import read_worker
from farcall.observe.reading.state import WorkerState
from farcall.observe.worker.observer import Observer
from tests.support.streams import SOON


@pytest.fixture
def observer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Observer]:
    monkeypatch.setenv("FARCALL_JOBS_DIR", str(tmp_path))
    found = Observer({"name": "w", "host": socket.gethostname(), "number": 1, "phase": "running"}, "job")
    found.start()
    yield found
    found.stop("left")


class Nothing(list[Any]):
    """No calls, or requests."""

    opened = begun = 0

    def waiting(self) -> list[Any]:
        return []

    entered = waiting


def agent_with(**extensions: Callable[[], object]) -> Any:
    """An agent that does nothing, whose extensions show this."""
    return SimpleNamespace(
        calls=SimpleNamespace(table=Nothing(), requests=Nothing()),
        group=SimpleNamespace(peers=SimpleNamespace(all=list)),
        executor=SimpleNamespace(counts=dict),
        extensions={name: SimpleNamespace(observed=make) for name, make in extensions.items()},
    )


def state(observer: Observer) -> WorkerState:
    assert observer.path is not None
    return read_worker(observer.path)


def test_file_is_there_when_the_observer_has_started(observer: Observer) -> None:
    assert state(observer).name == "w"
    assert state(observer).beat is not None


def test_part_that_fails_leaves_the_rest_of_the_snapshot(observer: Observer) -> None:
    def fail() -> None:
        raise RuntimeError("dictionary changed size during iteration")

    observer.add(agent_with(bad=fail, good=lambda: [7]))
    assert observer.look_now(SOON)
    snapshot = state(observer).snapshot
    assert (snapshot["bad"], snapshot["good"]) == ({"unknown": "RuntimeError"}, [7])


def test_process_that_ends_during_a_look_is_said_to_have_left(observer: Observer) -> None:
    looks, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        looks.set()
        may_end.wait(SOON)

    path = observer.path
    assert path is not None
    observer.add(agent_with(slow=wait))
    observer.identify(phase="leaving")
    assert looks.wait(SOON)
    ending = threading.Thread(target=observer.stop, args=("left",))
    ending.start()
    while observer.identity["phase"] != "left":
        pass
    may_end.set()
    ending.join()
    assert read_worker(path).phase == "left"


def test_worker_whose_folder_is_gone_joins_all_the_same(observer: Observer, tmp_path: Path) -> None:
    tmp_path.rename(tmp_path.with_name("gone"))  # at once, as the observer writes files in it
    observer.identify("other job", phase="running")
    observer.look_now()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_file_that_cannot_be_written_has_the_time_of_each_look(
    observer: Observer, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    path = observer.path
    assert path is not None
    monkeypatch.setattr("farcall.observe.worker.state_file.write_private", fail)
    while observer.look_now(0.1):
        pass  # one that had begun before
    for _ in range(2):
        os.utime(path, (1.0, 1.0))
        while os.stat(path).st_mtime == 1.0:
            observer.look_now(0.1)


def test_file_that_moves_while_it_is_written_is_in_one_folder(
    observer: Observer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job" / "of_another_worker").touch()
    moving = threading.Thread(target=observer.identify, args=("other",))

    def write(path: Path, content: bytes, **options: bool) -> None:
        if moving.ident is None:
            moving.start()
            moving.join(0.5)  # it may wait for the end of this
        write_private(path, content, **options)

    monkeypatch.setattr("farcall.observe.worker.state_file.write_private", write)
    assert observer.look_now(SOON)
    moving.join()
    assert observer.look_now(SOON)
    assert [path.parent.name for path in tmp_path.rglob("*.state")] == ["other"]

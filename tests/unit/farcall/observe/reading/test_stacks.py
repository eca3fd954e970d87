"""Stacks as lines."""

from __future__ import annotations

import threading

import pytest

from farcall.observe.format.frozen_stacks import Stack
from farcall.observe.reading.stacks import lines_of_all, stack_lines
from farcall.observe.reading.state import Process, WorkerState
from rpc.runtime import code_folders

OURS = code_folders.__file__
PLACES = [
    ["wait", threading.__file__, 5],
    ["wait_for", OURS, 4],
    ["rpc_sync", OURS, 3],
    ["step", "/home/me/train.py", 2],
    ["work", OURS, 1],
    ["Thread.run", threading.__file__, 8],
    ["Thread._bootstrap", threading.__file__, 7],
    ["_run_code", "<frozen runpy>", 6],
]
FOLDED = [
    f"    wait  {threading.__file__}:5",
    "    ... 2 frames of farcall (--all)",
    "    step  train.py:2",
    "    ... 1 frame of farcall (--all)",
]


def worker() -> WorkerState:
    thread = {"id": 1, "name": "MainThread", "stack": PLACES}
    facts = {"name": "worker0", "rank": 0, "folder": "/home/me"}
    return WorkerState(None, {"worker": facts, "threads": [thread]}, Process(alive=True))


def test_frames_of_farcall_that_follow_each_other_are_one_line() -> None:
    assert list(stack_lines(worker()))[2:] == FOLDED


def test_all_frames_are_shown_if_asked_for() -> None:
    lines = list(stack_lines(worker(), everything=True))[2:]
    assert [line.split()[0] for line in lines] == [name for name, _, _ in PLACES]


def test_frames_of_farcall_are_folded_in_stacks_written_without_the_interpreter() -> None:
    places = [(str(name), str(file), int(str(line))) for name, file, line in PLACES]
    frozen = WorkerState(
        None,
        {"worker": {"name": "worker0", "rank": 0}, "monotonic": 0.0},
        Process(alive=False),
        now=100.0,
        frozen={1: Stack(1, tuple(places))},
    )
    assert "    ... 2 frames of farcall (--all)" in list(stack_lines(frozen))


@pytest.mark.parametrize(
    ("doing", "said"),
    [
        ("waits for a lock", "  MainThread: waits for a lock `rpc`"),
        ("is in shutdown()", "  MainThread: is in shutdown()"),
    ],
)
def test_the_name_of_what_a_thread_waits_for_is_shown(doing: str, said: str) -> None:
    shown = worker()
    shown.snapshot["threads"][0] |= {"doing": doing, "on": "rpc"}
    assert list(stack_lines(shown))[1] == said


def test_native_stacks_that_are_missing_do_not_keep_those_of_other_workers_from_being_shown() -> None:
    """Here none are available. The reasons come in the end, each once."""
    elsewhere = [
        WorkerState(None, {"worker": {"name": name, "rank": 0, "host": "far"}}, Process(alive=True))
        for name in ("worker0", "worker1", "worker1")
    ]
    with pytest.raises(OSError, match=r"worker0 runs on far: .*\nworker1 runs on far: [^\n]*$"):
        list(lines_of_all(elsewhere, native=True, everything=False))

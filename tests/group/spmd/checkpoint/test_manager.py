"""Checkpoints of sharded tensors by ``CheckpointManager``."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.api import CheckpointException

import spmd
from spmd.checkpoint import CheckpointManager
from tests.group.spmd.checkpoint.two_layers import assert_same, on_cpu, sharded
from tests.group.spmd.driven import driven

pytestmark = pytest.mark.processes


@driven
def test_a_manager_saves_every_so_many_steps() -> None:
    with tempfile.TemporaryDirectory() as path:
        manager = CheckpointManager(path, save_interval=10, chkpt_on_preemption=False)
        model = sharded()
        state = model.state_dict()
        assert [step for step in range(25) if manager.save(step, state)] == [0, 10, 20]
        assert manager.save(7, state, force=True)
        assert manager.all_steps() == [0, 7, 10, 20]
        other = sharded()
        manager.restore(7, other.state_dict())
        assert_same(model, other)
        with pytest.raises(AssertionError, match="Cannot restore from untracked step 3"):
            manager.restore(3, state)


@driven
def test_the_oldest_by_time_goes_also_for_a_new_manager() -> None:
    with tempfile.TemporaryDirectory() as path:
        state = {"x": torch.ones(2)}
        manager = CheckpointManager(path, 10, max_to_keep=2, chkpt_on_preemption=False)
        for step in (10, 20, 30, 10):
            assert manager.save(step, state)
        assert manager.all_steps() == [10, 30]
        later = CheckpointManager(path, 10, max_to_keep=2, chkpt_on_preemption=False)
        assert later.save(20, state)
        assert later.all_steps() == [10, 20]
        assert sorted(os.listdir(path)) == ["10", "20"]


@driven
def test_a_save_in_the_background_has_the_state_of_its_step() -> None:
    with tempfile.TemporaryDirectory() as path:
        model = sharded()
        before = on_cpu(model)
        manager = CheckpointManager(path, 10, chkpt_on_preemption=False)
        assert manager.save_async(10, model.state_dict())
        with torch.no_grad():
            for each in model.parameters():
                each.zero_()
        assert not manager.save_async(11, model.state_dict())
        manager.join()
        assert manager.all_steps() == [10]
        manager.restore(10, model.state_dict())
        assert all(value.equal(before[name]) for name, value in on_cpu(model).items())


@driven
def test_a_save_that_fails_in_the_background_is_raised_by_join() -> None:
    with tempfile.TemporaryDirectory() as path:
        manager = CheckpointManager(path, 1, chkpt_on_preemption=False)
        assert manager.save_async(1, {"x": lambda: 0})  # cannot be pickled
        with pytest.raises(CheckpointException, match="pickle"):
            manager.join()
        assert manager.all_steps() == []


@driven
def test_sigterm_means_to_save_at_the_next_step() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with tempfile.TemporaryDirectory() as path:
            manager = CheckpointManager(path, 100)
            state = {"x": torch.ones(1)}
            assert not manager.save(1, state)
            assert not manager.reached_preemption(1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert manager.reached_preemption(2)
            assert manager.save(2, state)
            assert manager.all_steps() == [2]
    finally:
        signal.signal(signal.SIGTERM, before)


@driven
def test_after_sigterm_one_step_more_is_saved_and_the_programs_own_handler_runs() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with tempfile.TemporaryDirectory() as path:
            manager = CheckpointManager(path, 100)
            os.kill(os.getpid(), signal.SIGTERM)
            state = {"x": torch.ones(1)}
            assert [step for step in range(1, 5) if manager.save_async(step, state)] == [1]
            manager.join()
            assert manager.reached_preemption(5)
            assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@driven
def test_a_step_that_fails_to_be_saved_again_is_still_what_it_was() -> None:
    with tempfile.TemporaryDirectory() as path:
        manager = CheckpointManager(path, 1, max_to_keep=1, chkpt_on_preemption=False)
        manager.save(5, {"x": torch.ones(1)})
        with pytest.raises(CheckpointException):
            manager.save(5, {"x": torch.zeros(1), "function": lambda: 0})
        for each in (manager, CheckpointManager(path, 1, chkpt_on_preemption=False)):
            state = {"x": torch.zeros(1)}
            each.restore(5, state)
            assert state["x"].item() == 1
        manager.save(5, {"x": torch.full((1,), 2.0)})
        manager.restore(5, state)
        assert state["x"].item() == 2
        assert os.listdir(path) == ["5"]


@driven
def test_an_error_of_the_disk_in_the_middle_of_a_tensor_names_the_folder() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with tempfile.TemporaryDirectory() as path:
        manager = CheckpointManager(path, 1, chkpt_on_preemption=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
        try:
            with pytest.raises(OSError, match=r"File too large.*1'") as caught:
                manager.save(1, {"x": torch.ones(100_000)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, f"{path}/1")


@driven
def test_a_step_that_the_user_has_removed_can_be_saved_again() -> None:
    with tempfile.TemporaryDirectory() as path:
        manager = CheckpointManager(path, 1, chkpt_on_preemption=False)
        manager.save(5, {"x": 1})
        shutil.rmtree(Path(path) / "5")
        manager.save(5, {"x": 2})
        state = {"x": 0}
        manager.restore(5, state)
        assert state == {"x": 2}


def test_what_is_left_of_a_removal_that_was_ended_goes_with_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = LocalFileSystem.rm

    def ended(files: LocalFileSystem, path: str, recursive: bool = False, **options: Any) -> None:
        if recursive:
            raise KeyboardInterrupt
        remove(files, path, **options)

    manager = CheckpointManager(tmp_path, 1, max_to_keep=1, chkpt_on_preemption=False)
    manager.save(1, {"x": 1})
    with monkeypatch.context() as patched:
        patched.setattr(LocalFileSystem, "rm", ended)
        with pytest.raises(KeyboardInterrupt):
            manager.save(2, {"x": 2})
    manager = CheckpointManager(tmp_path, 1, chkpt_on_preemption=False)
    assert manager.all_steps() == [2]
    manager.save(3, {"x": 3})
    assert sorted(os.listdir(tmp_path)) == ["2", "3"]


@driven
def test_what_is_saved_at_once_comes_behind_what_is_saved_in_the_background() -> None:
    with tempfile.TemporaryDirectory() as path:
        manager = CheckpointManager(path, 1, max_to_keep=1, max_pending_async=3, chkpt_on_preemption=False)
        for step in (1, 2, 3):
            manager.save_async(step, {"x": torch.ones(1000)})
        manager.save(4, {"x": torch.ones(1)})
        assert manager.all_steps() == [4]
        assert os.listdir(path) == ["4"]


@driven
def test_several_threads_write_the_shards() -> None:
    with tempfile.TemporaryDirectory() as path:
        mesh = spmd.get_1d_mesh()
        state = {
            str(number): spmd.mark_sharding(torch.randn(8, 3).to(spmd.device()), mesh, (0, None))
            for number in range(20)
        }
        manager = CheckpointManager(path, 1, num_of_threads=4, chkpt_on_preemption=False)
        manager.save(1, state)
        again = {name: torch.zeros(8, 3) for name in state}
        manager.restore(1, again)
        assert all(again[name].equal(each.cpu()) for name, each in state.items())


@driven
def test_what_a_program_changes_is_not_changed_in_what_is_saved_in_the_background() -> None:
    with tempfile.TemporaryDirectory() as path:
        manager = CheckpointManager(path, 1, chkpt_on_preemption=False)
        seen = Seen()
        manager.save_async(1, {"seen": seen})
        seen.files.append("b")
        manager.join()
        state = {"seen": Seen()}
        manager.restore(1, state, weights_only=False)  # the class is this program's own
        assert state["seen"].files == ["a"]


class Seen:
    """State of a program's own."""

    def __init__(self) -> None:
        self.files = ["a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_interval": 0}, "save_interval must be positive"),
        ({"save_interval": 1, "max_to_keep": -1}, "max_to_keep must be non-negative"),
        ({"save_interval": 1, "max_pending_async": 0}, "max_pending_async must be positive"),
    ],
)
@driven
def test_numbers_that_cannot_be_are_refused(options: Any, message: str) -> None:
    with tempfile.TemporaryDirectory() as path, pytest.raises(AssertionError, match=message):
        CheckpointManager(path, **options)

"""What a ``CheckpointManager`` removes, what it leaves alone, and what it refuses to load."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from spmd.checkpoint import CheckpointManager
from tests.unit.spmd.checkpoint.test_bounds import HARMFUL, archive

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def manager(path: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(path, 1, chkpt_on_preemption=False, **options)


def state(value: float = 1.0) -> dict[str, Any]:
    return {"x": torch.full((2,), value)}


def interrupt(saving: CheckpointManager, step: int) -> None:
    """Leave what a process leaves that is killed while it saves."""
    with pytest.raises(CheckpointException):
        saving.save(step, {"function": lambda: 0})


# ---- folders


@pytest.mark.parametrize("name", ["2024", "7", "7.coming", "2.going"])
def test_a_folder_of_the_user_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text("precious")
    saving = manager(tmp_path, max_to_keep=1)
    for step in (1, 2, 3):
        saving.save(step, state())
    assert (tmp_path / name / "notes.txt").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == sorted(["3", name])


@pytest.mark.parametrize("name", ["7", "7.coming", "7.going"])
def test_a_step_is_not_saved_over_a_folder_of_the_user(tmp_path: Path, name: str) -> None:
    saving = manager(tmp_path)
    if name != "7":
        saving.save(7, state())
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="not made by a CheckpointManager") as caught:
        saving.save(7, state())
    assert caught.value.filename == str(tmp_path / name)
    assert os.listdir(tmp_path / name) == ["notes.txt"]
    assert saving.save(8, state())


def test_a_checkpoint_of_another_program_is_neither_listed_nor_overwritten(tmp_path: Path) -> None:
    save(state(3.0), storage_writer=FileSystemWriter(tmp_path / "3", sync_files=False), no_dist=True)
    before = sorted(os.listdir(tmp_path / "3"))
    saving = manager(tmp_path)
    saving.save(4, state())
    assert saving.all_steps() == [4]
    with pytest.raises(FileExistsError):
        saving.save(3, state())
    assert sorted(os.listdir(tmp_path / "3")) == before


def test_a_copy_of_a_checkpoint_under_another_number_is_the_users(tmp_path: Path) -> None:
    manager(tmp_path).save(10, state())
    shutil.copytree(tmp_path / "10", tmp_path / "11")
    saving = manager(tmp_path, max_to_keep=1)
    assert saving.all_steps() == [10]
    with pytest.raises(FileExistsError):
        saving.save(11, state())
    saving.save(12, state())
    assert sorted(os.listdir(tmp_path)) == ["11", "12"]


def test_an_empty_folder_can_be_saved_to(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    saving = manager(tmp_path)
    saving.save(5, state())
    assert saving.all_steps() == [5]


def test_the_next_save_removes_interrupted_ones(tmp_path: Path) -> None:
    manager(tmp_path).save(1, state())
    first, second = manager(tmp_path), manager(tmp_path)
    interrupt(first, 1)
    interrupt(second, 2)
    shutil.copytree(tmp_path / "1", tmp_path / "1.going")
    later = manager(tmp_path)
    assert later.all_steps() == [1]
    assert sorted(os.listdir(tmp_path)) == ["1", "1.coming", "1.going", "2"]  # to look removes nothing
    later.save(4, state())
    assert sorted(os.listdir(tmp_path)) == ["1", "4"]
    assert manager(tmp_path).all_steps() == [1, 4]


@pytest.mark.parametrize("left", ["1.coming", "1.going"])
def test_a_replacement_that_was_interrupted_is_finished(tmp_path: Path, left: str) -> None:
    manager(tmp_path).save(1, state(5.0))
    (tmp_path / "1").rename(tmp_path / left)
    (tmp_path / "1.copy").mkdir()
    found, restored = manager(tmp_path), state()
    found.restore(1, restored)
    assert restored["x"].tolist() == [5.0, 5.0]


# ---- what is loaded


class RunsOnLoad:
    """Unpickles as a call of a function."""

    def __init__(self, call: Callable[..., Any], *args: object) -> None:
        self._call = call, args

    def __reduce__(self) -> Any:
        return self._call


def metadata_of(path: Path) -> Metadata:
    found = pickle.loads((path / ".metadata").read_bytes())
    assert isinstance(found, Metadata)
    return found


def test_entries_that_are_no_tensors_are_restored_wherever_they_are(tmp_path: Path) -> None:
    saved = {**state(), "run": {"steps": [1, 2], "names": {"a": "b"}}, "epoch": 3}
    manager(tmp_path).save(1, saved)
    restored: dict[str, Any] = {**state(), "run": {"steps": [0, 0], "names": {"a": ""}}, "epoch": 0}
    manager(tmp_path).restore(1, restored)
    assert restored["run"] == saved["run"]
    assert restored["epoch"] == 3


@pytest.mark.parametrize("place", ["whole", "planner", "key"])
def test_metadata_that_runs_code_is_refused(tmp_path: Path, place: str) -> None:
    saving = manager(tmp_path)
    saving.save(1, state())
    evil = RunsOnLoad(os.mkdir, str(tmp_path / "ran"))
    metadata: Any = metadata_of(tmp_path / "1")
    if place == "whole":
        metadata = evil
    elif place == "planner":
        metadata.planner_data["x"] = evil
    else:
        metadata.storage_data[evil] = metadata.storage_data.popitem()[1]
    (tmp_path / "1" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match=r"names posix\.mkdir"):
        saving.restore(1, state())
    assert not (tmp_path / "ran").exists()


def test_metadata_that_changes_a_class_is_refused(tmp_path: Path) -> None:
    saving = manager(tmp_path)
    saving.save(1, state())
    named = pickle.dumps(MetadataIndex, protocol=2)[:-1]
    attributes = pickle.dumps((None, {"changed": 1}), protocol=2)[2:-1]
    (tmp_path / "1" / ".metadata").write_bytes(named + attributes + pickle.BUILD + pickle.STOP)
    with pytest.raises(pickle.UnpicklingError, match=r"changes <class .*MetadataIndex"):
        saving.restore(1, state())
    assert not hasattr(MetadataIndex, "changed")


def test_metadata_whose_files_are_no_mapping_is_refused(tmp_path: Path) -> None:
    saving = manager(tmp_path)
    saving.save(1, state())
    metadata: Any = metadata_of(tmp_path / "1")
    metadata.storage_data = Metadata({})
    metadata.storage_data.values = OrderedDict  # the class: its instances name no files
    (tmp_path / "1" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match="does not say in which files"):
        saving.restore(1, state())


def test_an_entry_that_runs_code_is_refused(tmp_path: Path) -> None:
    saving = manager(tmp_path)
    saving.save(1, {**state(), "extra": RunsOnLoad(os.mkdir, str(tmp_path / "ran"))})
    with pytest.raises(CheckpointException, match=r"entry 'extra'.*names posix\.mkdir.*weights_only=False"):
        saving.restore(1, {**state(), "extra": None})
    assert not (tmp_path / "ran").exists()
    saving.restore(1, {**state(), "extra": None}, weights_only=False)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("other", ["/etc/hostname", "../other/__0_0.distcp"])
def test_metadata_that_names_a_file_elsewhere_is_refused(tmp_path: Path, other: str) -> None:
    saving = manager(tmp_path)
    saving.save(1, state())
    metadata: Any = metadata_of(tmp_path / "1")
    next(iter(metadata.storage_data.values())).relative_path = other
    (tmp_path / "1" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match="a file outside the checkpoint"):
        saving.restore(1, state())


PIPES_AND_LINKS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link to what never ends": lambda path: path.symlink_to("/dev/zero"),
    "nested": lambda path: path.write_text("[" * 4000),
    "no number": lambda path: path.write_text('{"step": Infinity, "time": 1}'),
}


@pytest.mark.parametrize("make", PIPES_AND_LINKS.values(), ids=PIPES_AND_LINKS)
def test_what_is_no_file_of_a_manager_is_passed_over(
    tmp_path: Path, make: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    manager(tmp_path).save(1, state())
    for name in (".manager_metadata", ".manager_folder"):
        (tmp_path / "1" / name).unlink()
        make(tmp_path / "1" / name)
    assert manager(tmp_path).all_steps() == []
    assert "Ignoring invalid checkpoints" in caplog.text


def test_a_folder_behind_a_link_is_not_removed(tmp_path: Path) -> None:
    other = manager(tmp_path / "other")
    interrupt(other, 7)
    (tmp_path / "own").mkdir()
    (tmp_path / "other" / "7" / "part").touch()
    (tmp_path / "own" / "7").symlink_to(tmp_path / "other" / "7")
    manager(tmp_path / "own").save(8, state())
    assert (tmp_path / "other" / "7" / "part").exists()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_link_to_a_file_elsewhere_and_a_pipe_are_refused(tmp_path: Path, name: str) -> None:
    saving = manager(tmp_path / "all")
    saving.save(1, state())
    file = tmp_path / "all" / "1" / name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(pickle.UnpicklingError, match=r"is a link to .*elsewhere, outside the checkpoint"):
        saving.restore(1, state())
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(pickle.UnpicklingError, match="is not a regular file"):
        saving.restore(1, state())


def test_a_checkpoint_whose_folder_is_a_link_is_restored(tmp_path: Path) -> None:
    manager(tmp_path / "there").save(1, state(2.0))
    (tmp_path / "here").symlink_to(tmp_path / "there")
    restored = state()
    manager(tmp_path / "here").restore(1, restored)
    assert restored["x"].tolist() == [2.0, 2.0]


def test_metadata_that_builds_more_than_it_should_is_refused(tmp_path: Path) -> None:
    saving = manager(tmp_path)
    saving.save(1, state())
    (tmp_path / "1" / ".metadata").write_bytes(HARMFUL["as a key"])
    with pytest.raises(pickle.UnpicklingError, match=r"damaged, or made to do harm: its \d+ bytes build"):
        saving.restore(1, state())


def legacy(packed: bytes) -> bytes:
    """A pickle as earlier versions of ``torch.save`` wrote it, and an archive behind it."""
    before, archived = io.BytesIO(), io.BytesIO()
    torch.save(None, before, _use_new_zipfile_serialization=False)
    torch.save(None, archived)
    header = before.getvalue().partition(pickle.dumps(None, 2))[0]
    return header + packed + archived.getvalue()


TENSORS = {
    "its pickle": lambda: archive(HARMFUL["as a key"]).getvalue(),
    "in capitals": lambda: archive(HARMFUL["as a key"], name="DATA.PKL").getvalue(),
    "two pickles": lambda: archive(HARMFUL["as a key"], twice=True).getvalue(),
    "compressed": lambda: archive(HARMFUL["as a key"], zipfile.ZIP_DEFLATED).getvalue(),
    "before an archive": lambda: legacy(HARMFUL["as a key"]),
    "no archive": lambda: HARMFUL["as a key"],
    "nothing": lambda: b"",
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("entry", ["x", "run"])
def test_a_file_that_builds_more_than_it_should_is_refused(
    tmp_path: Path, entry: str, make: Callable[[], bytes]
) -> None:
    saving = manager(tmp_path)
    saving.save(1, {**state(), "run": 1})
    metadata: Any = metadata_of(tmp_path / "1")
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == entry)
    info.relative_path, info.offset, info.length = "other.distcp", 0, len(make())
    (tmp_path / "1" / "other.distcp").write_bytes(make())
    (tmp_path / "1" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        CheckpointException, match=rf"the (tensor|entry) '{entry}' of the checkpoint is damaged"
    ):
        saving.restore(1, {**state(), "run": 0})


def test_a_tensor_that_is_to_be_decompressed_is_refused(tmp_path: Path) -> None:
    saving = manager(tmp_path)
    saving.save(1, state())
    metadata: Any = metadata_of(tmp_path / "1")
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd"]
    (tmp_path / "1" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException, match="'x' is compressed"):
        saving.restore(1, state())


def test_classes_that_the_program_declares_are_restored(tmp_path: Path) -> None:
    saving = manager(tmp_path)
    saving.save(1, {"options": argparse.Namespace(lr=0.5)})
    restored: dict[str, Any] = {"options": None}
    with pytest.raises(CheckpointException, match=r"names argparse\.Namespace"):
        saving.restore(1, restored)
    with torch.serialization.safe_globals([argparse.Namespace]):
        saving.restore(1, restored)
    assert restored == {"options": argparse.Namespace(lr=0.5)}


def test_what_a_training_loop_saves_is_restored(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2).state_dict(),
        "rng": torch.get_rng_state(),
        "step": 7,
        "names": ("a", None, 1.5, {"b": [True, b"c"]}),
        "nested": [torch.zeros(2), torch.zeros(0, dtype=torch.int64)],
        "dtype": torch.float16,
        "shape": torch.Size([2, 3]),
    }
    saving = manager(tmp_path)
    saving.save(1, saved)
    restored = {**saved, "step": 0, "names": None, "dtype": None, "shape": None}
    saving.restore(1, restored)
    assert {name: restored[name] for name in ("step", "names", "dtype", "shape")} == {
        name: saved[name] for name in ("step", "names", "dtype", "shape")
    }

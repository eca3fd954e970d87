"""The folders of a ``CheckpointManager``, one per step, and how it recognizes its own.

A save writes three things into the step's folder, in this order: a marker, ``.manager_folder``, which records
that a manager has made the folder, and for which step; the checkpoint; and ``.manager_metadata``, which makes
the checkpoint valid. A folder with a marker and without ``.manager_metadata`` is an interrupted save, and may
be removed. A folder without either does not belong to a manager, whatever its name is, and neither does a
copy of a step's folder under another number: they are neither changed nor removed.

A step that is saved again is written to a second folder, ``STEP.coming``, and replaces the first when it is
complete. So there is a complete checkpoint at any time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["Checkpoint", "Folders", "check_file", "naming"]

_MARKER: Final = ".manager_folder"
_METADATA: Final = ".manager_metadata"
_COMING: Final = ".coming"
"""Suffix of the folder of a step that is being saved again."""
_GOING: Final = ".going"
"""Suffix of the folder that it replaces, while the two are exchanged."""
_MAX_CHARACTERS: Final = 4096
"""Maximum length of a marker, and of ``.manager_metadata``."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its step, and the time at which it was saved, in seconds since the epoch."""

    step: int
    time: float


class Folders:
    """The folders below the path of a manager. One thread at a time may use it.

    Args:
        path: a folder, or a URL that ``fsspec`` knows; with a separator at its end.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._files, root = url_to_fs(path)
        self._root = str(root).rstrip("/")
        self._files.makedirs(self._root, exist_ok=True)

    def found(self) -> tuple[list[Checkpoint], list[str], list[str]]:
        """Look at all folders, and finish replacements that were interrupted.

        Returns:
            The complete checkpoints, the oldest first; the names of the folders of interrupted saves; and the
            paths of everything else.
        """
        complete, interrupted, others = [], [], []
        paths = [str(path).rstrip("/") for path in self._files.ls(self._root, detail=False)]
        for path in list(paths):
            place, _, state = path.rpartition(".")
            if f".{state}" in (_COMING, _GOING) and place not in paths and self._saved(path) is not None:
                self._files.mv(path, place, recursive=True)
                paths[paths.index(path)] = place
        for path in paths:
            name = path.rpartition("/")[2]
            saved = self._saved(path)
            if saved is not None and name == str(saved.step):
                complete.append(saved)
            elif self._is_own(name) and (saved is None or not name.isdecimal()):
                interrupted.append(name)
            else:
                others.append(path)
        return sorted(complete, key=lambda each: each.time), interrupted, others

    def target(self, step: int, *, again: bool) -> str:
        """The name of the folder that a save writes to.

        Args:
            step: that is saved.
            again: there is a complete checkpoint of this step.

        Raises:
            FileExistsError: a folder that would have to be removed was not made by a manager.
        """
        name = str(step)
        for each in (name, name + _COMING, name + _GOING) if again else (name,):
            if not self._is_own(each) and not self._is_empty(each):
                raise FileExistsError(
                    errno.EEXIST,
                    f"step {step} cannot be saved: this folder was not made by a CheckpointManager for that "
                    "step, so it is not overwritten. Move it, or give the manager another path",
                    f"{self.path}{each}",
                )
        return name + _COMING if again else name

    def begin(self, name: str, step: int) -> None:
        """Make an empty folder for a save, with its marker."""
        self.remove(name)
        folder = f"{self._root}/{name}"
        self._files.makedirs(folder, exist_ok=True)
        self._write(f"{folder}/{_MARKER}", {"step": step})

    def complete(self, name: str, saved: Checkpoint) -> None:
        """Make the checkpoint in a folder count, in the place of an earlier one of its step."""
        self._write(f"{self._root}/{name}/{_METADATA}", {"step": saved.step, "time": saved.time})
        place = str(saved.step)
        if name == place:
            return
        folder = f"{self._root}/{place}"
        self.remove(place + _GOING)
        if self._files.exists(folder):  # the user may have removed it
            self._files.mv(folder, folder + _GOING, recursive=True)
        self._files.mv(f"{self._root}/{name}", folder, recursive=True)
        self.remove(place + _GOING)

    def remove(self, name: str) -> None:
        """Remove a folder that a manager has made; any other stays."""
        folder = f"{self._root}/{name}"
        if not self._is_own(name):
            return
        if self._files.exists(f"{folder}/{_METADATA}"):  # without it the checkpoint does not count
            self._files.rm(f"{folder}/{_METADATA}")
        for each in self._files.ls(folder, detail=False):
            if not str(each).endswith(f"/{_MARKER}"):  # it goes last: a later manager can finish the removal
                self._files.rm(each, recursive=True)
        self._files.rm(folder, recursive=True)

    def _is_own(self, name: str) -> bool:
        """Whether a manager has made the folder of that name, for the step that the name says."""
        number, _, state = name.partition(".")
        if not number.isdecimal() or f".{state}" not in (".", _COMING, _GOING):
            return False
        folder = f"{self._root}/{name}"
        if isinstance(self._files, LocalFileSystem) and os.path.islink(folder):
            return False  # what is removed is below the path of the manager
        said = self._read(f"{folder}/{_MARKER}") or self._read(f"{folder}/{_METADATA}")
        return said is not None and str(said.get("step")) == number

    def _is_empty(self, name: str) -> bool:
        folder = f"{self._root}/{name}"
        return not self._files.exists(folder) or (
            self._files.isdir(folder) and not self._files.ls(folder, detail=False)
        )

    def _saved(self, path: str) -> Checkpoint | None:
        """The checkpoint in a folder, if it is complete."""
        said = self._read(f"{path}/{_METADATA}")
        try:
            return None if said is None else Checkpoint(int(said["step"]), float(said["time"]))
        except (ValueError, KeyError, TypeError, OverflowError):
            return None

    def _read(self, path: str) -> dict[str, Any] | None:
        try:
            if isinstance(self._files, LocalFileSystem):
                check_file(*os.path.split(path))
            with self._files.open(path, "r") as file:
                said = json.loads(file.read(_MAX_CHARACTERS))
        except (OSError, ValueError, RecursionError):
            return None
        return said if isinstance(said, dict) else None

    def _write(self, path: str, said: dict[str, Any]) -> None:
        with naming(path), self._files.open(path, "w") as file:
            json.dump(said, file)


def check_file(folder: str, name: str) -> None:
    """Check that a file in a folder of this host, if there is one, is a regular file below that folder.

    Raises:
        PermissionError: it is not, and may even wait for a writer.
    """
    folder = os.path.realpath(folder)
    path = os.path.join(folder, name)
    found = os.path.realpath(path)
    if os.path.commonpath([folder, found]) != folder:
        raise PermissionError(errno.EPERM, f"{path} is a link to {found}, outside the checkpoint")
    if os.path.lexists(found) and not os.path.isfile(found):
        raise PermissionError(errno.EPERM, f"{path} is not a regular file")


@contextlib.contextmanager
def naming(folder: str) -> Iterator[None]:
    """Add the folder to an error of the file system that does not say where it happened, such as that of a
    full disk.
    """
    try:
        yield
    except (OSError, CheckpointException) as error:
        causes = [error] if isinstance(error, OSError) else [cause for cause, _ in error.failures.values()]
        found = next((each for each in map(_system_error, causes) if each is not None), None)
        if found is None or found.filename is not None:
            raise
        raise OSError(found.errno, found.strerror, folder) from error


def _system_error(error: BaseException | None) -> OSError | None:
    """The error of the file system behind an error: PyTorch's writer of archives raises its own over it."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error

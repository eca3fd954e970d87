"""Checkpoints step by step: every so many steps, in the background, on SIGTERM, the last few kept.

A step's folder counts once ``.manager_metadata`` is in it, which is written last. A step that is saved again
is written beside the old one, and takes its place when it is complete. So there is a whole checkpoint at any
time, and ``kill -9`` costs the one under way at most. What it leaves half-written goes with the next save.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch.distributed as dist
from fsspec.core import url_to_fs
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from spmd.checkpoint.file_systems import FsspecReader, FsspecWriter
from spmd.checkpoint.planners import SPMDLoadPlanner, SPMDSavePlanner, sharded_cpu_state_dict
from spmd.engine.current import is_running
from spmd.engine.start import sync

__all__ = ["CheckpointManager"]

_log: Final = logging.getLogger(__name__)
_METADATA: Final = ".manager_metadata"
_COMING: Final = ".coming"
"""Behind the number of a step that is being saved again."""
_GOING: Final = ".going"
"""Behind that of the one before, while the two change places."""


@dataclass(frozen=True)
class _Checkpoint:
    step: int
    time: float


class CheckpointManager:
    """Saves a program's state now and then, and knows what it has saved.

    Call ``save`` or ``save_async`` in every step; they save when it is time to. After SIGTERM the next step
    is saved, whatever its number, and the program goes on; it asks ``reached_preemption``. A handler that the
    program has set before is called as well.

    Args:
        path: a folder, or a URL that ``fsspec`` knows. Each step has a folder in it.
        save_interval: steps between checkpoints.
        max_to_keep: how many checkpoints to keep, the oldest by time go first; 0 for all.
        max_pending_async: how many saves may be under way in the background; the next one waits.
        num_of_threads: threads that write one checkpoint.
        process_group: for programs whose processes save together; a driver alone needs none.
        chkpt_on_preemption: whether SIGTERM means to save. Only the main thread can ask for that.

    Raises:
        AssertionError: a number that cannot be.

    Example: see :mod:`spmd.checkpoint`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        save_interval: int,
        max_to_keep: int = 0,
        max_pending_async: int = 1,
        num_of_threads: int = 1,
        process_group: dist.ProcessGroup | None = None,
        chkpt_on_preemption: bool = True,
    ) -> None:
        _check(save_interval > 0, "save_interval must be positive")
        _check(max_to_keep >= 0, "max_to_keep must be non-negative")
        _check(max_pending_async > 0, "max_pending_async must be positive")
        self.base_path = os.path.join(os.fspath(path), "")
        self.save_interval, self.max_to_keep = save_interval, max_to_keep
        self.num_of_threads = num_of_threads
        self.chkpt_on_preemption = chkpt_on_preemption
        self.pg = process_group
        self._files, self._root = url_to_fs(self.base_path)
        self._root = self._root.rstrip("/")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="spmd checkpoint")
        self._room = threading.Semaphore(max_pending_async)
        self._pending: list[Future[None]] = []
        self._lock = threading.Lock()
        self._halves: list[str] = []
        self._known = self._found()
        self._terminated = threading.Event()
        self._has_saved_since = False
        self._handler_before: Any = None
        if chkpt_on_preemption and threading.current_thread() is threading.main_thread():
            self._handler_before = signal.signal(signal.SIGTERM, self._note_termination)

    def _note_termination(self, number: int, frame: FrameType | None) -> None:
        self._terminated.set()
        if callable(self._handler_before):
            self._handler_before(number, frame)

    # ---- saving

    def should_save(self, step: int) -> bool:
        """Whether ``save`` would save in this step."""
        if step % self.save_interval == 0:
            return True
        return self.chkpt_on_preemption and self.reached_preemption(step) and not self._has_saved_since

    def save(self, step: int, state_dict: Mapping[str, Any], force: bool = False) -> bool:
        """Save if it is time to, behind what is being saved in the background.

        Args:
            step: the program's.
            state_dict: nested dicts of tensors and other things that can be pickled.
            force: save in any case.

        Returns:
            whether it has saved.

        Raises:
            Exception: what an earlier save in the background has raised.
        """
        if not (force or self.should_save(step)):
            return False
        terminated = self._terminated.is_set()
        self.join()
        if is_running():
            sync()
        self._save(step, dict(state_dict))
        self._has_saved_since = terminated
        return True

    def save_async(self, step: int, state_dict: Mapping[str, Any], force: bool = False) -> bool:
        """Like ``save``; what is saved is copied to the driver now, and written in the background.

        Raises:
            Exception: what an earlier save in the background has raised.
        """
        self._raise_what_failed()
        if not (force or self.should_save(step)):
            return False
        self._has_saved_since = self._terminated.is_set()
        copied = sharded_cpu_state_dict(state_dict)
        self._room.acquire()
        future = self._background.submit(self._save, step, copied)
        future.add_done_callback(lambda _: self._room.release())
        self._pending.append(future)
        return True

    def join(self) -> None:
        """Wait for saves in the background.

        Raises:
            Exception: what one of them has raised.
        """
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def _raise_what_failed(self) -> None:
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        for future in done:
            future.result()

    def _save(self, step: int, state_dict: dict[str, Any]) -> None:
        with self._lock:
            name = str(step)
            is_there = any(each.step == step for each in self._known)
            target = name + _COMING if is_there else name
            for each in {*self._halves, target}:
                self._remove(each)
            self._halves = [target]
            self._meet()
            with _alone(), _naming(f"{self.base_path}{target}"):
                save(
                    state_dict,
                    storage_writer=FsspecWriter(
                        f"{self.base_path}{target}", thread_count=self.num_of_threads, per_thread_copy_ahead=0
                    ),
                    planner=SPMDSavePlanner(),
                    process_group=self.pg,
                    no_dist=not dist.is_initialized(),
                )
            last = max((each.time for each in self._known), default=0.0)
            saved = _Checkpoint(step, max(time.time(), last + 1e-3))  # clocks may be set back
            if self._is_first():
                metadata = f"{self._root}/{target}/{_METADATA}"
                with _naming(metadata), self._files.open(metadata, "w") as file:
                    json.dump({"step": saved.step, "time": saved.time}, file)
            self._halves.clear()
            if is_there and self._is_first():
                self._replace(name)
            self._known = [*(each for each in self._known if each.step != step), saved]
            while 0 < self.max_to_keep < len(self._known):
                oldest, *self._known = self._known
                self._remove(str(oldest.step))

    def _replace(self, name: str) -> None:
        """Put a step that has been saved again in the place of the one before."""
        folder = f"{self._root}/{name}"
        self._remove(name + _GOING)
        if self._files.exists(folder):  # the user may have removed it
            self._files.mv(folder, folder + _GOING, recursive=True)
        self._files.mv(folder + _COMING, folder, recursive=True)
        self._remove(name + _GOING)

    def _remove(self, name: str) -> None:
        folder = f"{self._root}/{name}"
        if self._is_first() and self._files.exists(folder):
            for each in (_METADATA, ".metadata"):  # without ours it does not count, without both it is a half
                if self._files.exists(f"{folder}/{each}"):
                    self._files.rm(f"{folder}/{each}")
            self._files.rm(folder, recursive=True)

    def _meet(self) -> None:
        """What the first process has removed, no other has begun to write."""
        if dist.is_initialized():
            dist.barrier(self.pg)

    def _is_first(self) -> bool:
        return not dist.is_initialized() or dist.get_rank(self.pg) == 0

    # ---- what there is

    def all_steps(self) -> list[int]:
        """The steps that can be restored, in order."""
        return sorted(each.step for each in self._known)

    def restore(self, step: int, state_dict: dict[str, Any]) -> None:
        """Load a step into the tensors of a state dict, in place; other entries are replaced.

        What is being saved in the background is waited for, so that nothing is removed meanwhile.

        Raises:
            AssertionError: there is no such step.
        """
        with self._lock, _alone():
            _check(
                step in self.all_steps(),
                f"Cannot restore from untracked step {step}. Valid steps are: {self.all_steps()}",
            )
            load(
                state_dict,
                storage_reader=FsspecReader(f"{self.base_path}{step}"),
                planner=SPMDLoadPlanner(),
                process_group=self.pg,
                no_dist=not dist.is_initialized(),
            )

    def reached_preemption(self, step: int) -> bool:
        """Whether SIGTERM has come.

        Raises:
            AssertionError: the manager was told not to look.
        """
        _check(
            self.chkpt_on_preemption,
            "Preemption detection not enabled. Please set chkpt_on_preemption when creating the "
            "CheckpointManager",
        )
        return self._terminated.is_set()

    def _found(self) -> list[_Checkpoint]:
        """What an earlier manager has saved, the oldest first."""
        found, others = [], []
        self._files.makedirs(self._root, exist_ok=True)
        paths = [str(path).rstrip("/") for path in self._files.ls(self._root, detail=False)]
        for path in list(paths):
            place, _, state = path.rpartition(".")
            if f".{state}" in (_COMING, _GOING) and place not in paths and self._read(path) is not None:
                self._files.mv(path, place, recursive=True)  # two were changing places
                paths[paths.index(path)] = place
        for path in paths:
            said = self._read(path)
            name = path.rpartition("/")[2]
            if self._is_half(path, name, said is not None):
                self._halves.append(name)
            elif said is None or name != str(said.step):
                others.append(path)
            else:
                found.append(said)
        if others:
            _log.warning("Ignoring invalid checkpoints: %s", ", ".join(others))
        if self._halves:
            _log.warning(
                "%s: saves that were ended in the middle. They do not count, and the next save removes them",
                ", ".join(self._halves),
            )
        return sorted(found, key=lambda each: each.time)

    def _is_half(self, path: str, name: str, is_complete: bool) -> bool:
        """Whether a manager that was killed has left that, and it is no checkpoint of somebody else's."""
        number, _, state = name.partition(".")
        if not number.isdecimal() or f".{state}" not in (".", _COMING, _GOING):
            return False
        return bool(state) or not (is_complete or self._files.exists(f"{path}/.metadata"))

    def _read(self, path: str) -> _Checkpoint | None:
        """What a folder holds, if it is complete."""
        try:
            with self._files.open(f"{path}/{_METADATA}", "r") as file:
                said = json.load(file)
            return _Checkpoint(int(said["step"]), float(said["time"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


@contextlib.contextmanager
def _naming(folder: str) -> Iterator[None]:
    """An error of the file system that does not say where it happened, such as that of a full disk, names the
    folder.
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


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without PyTorch's warning that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)

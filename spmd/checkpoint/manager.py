"""Checkpoints at intervals, in the background, and on SIGTERM; the last few are kept.

There is a complete checkpoint at any time, and ``kill -9`` costs at most the one under way
(:mod:`spmd.checkpoint.folders`). The next save removes what such a save has left. Nothing else is removed or
overwritten but what a manager has made.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rpc.runtime.preemption import Watch
from spmd.checkpoint.folders import Checkpoint, Folders, naming
from spmd.checkpoint.planners import SPMDLoadPlanner, SPMDSavePlanner, sharded_cpu_state_dict
from spmd.checkpoint.reading import RestrictedReader
from spmd.checkpoint.torch_internals import FsspecReader, FsspecWriter
from spmd.engine.driver.current import is_running
from spmd.engine.driver.start import sync

__all__ = ["CheckpointManager"]

_log: Final = logging.getLogger(__name__)


class CheckpointManager:
    """Saves a program's state periodically, and lists what it has saved.

    Call ``save`` or ``save_async`` in every step; they save when it is time to. When the
    engine announces a preemption (``farcall.preempted``), the next step is saved, whatever its number, and
    the program goes on; it asks ``reached_preemption``. A handler that the program has set before for the
    signal is called as well.

    Args:
        path: a folder, or a URL that ``fsspec`` knows. Each step has a folder in it.
        save_interval: steps between checkpoints.
        max_to_keep: how many checkpoints to keep, the oldest by time go first; 0 for all.
        max_pending_async: how many saves may be under way in the background; the next one waits.
        num_of_threads: threads that write one checkpoint.
        process_group: for programs whose processes save together; a driver alone needs none.
        chkpt_on_preemption: whether to save when a preemption is announced. Only the main thread can ask for
            that.

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
        self._folders = Folders(self.base_path)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="spmd checkpoint")
        self._room = threading.Semaphore(max_pending_async)
        self._pending: list[Future[None]] = []
        self._lock = threading.Lock()
        self._interrupted: list[str] = []
        self._known = self._found()
        self._has_saved_since = False
        is_main = threading.current_thread() is threading.main_thread()
        self._watch = Watch() if chkpt_on_preemption and is_main else None

    @property
    def _preempted(self) -> bool:
        return self._watch is not None and self._watch.preempted

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
        preempted = self._preempted
        self.join()
        if is_running():
            sync()
        self._save(step, dict(state_dict))
        self._has_saved_since = preempted
        return True

    def save_async(self, step: int, state_dict: Mapping[str, Any], force: bool = False) -> bool:
        """Like ``save``; what is saved is copied to the driver now, and written in the background.

        Raises:
            Exception: what an earlier save in the background has raised.
        """
        self._raise_what_failed()
        if not (force or self.should_save(step)):
            return False
        self._has_saved_since = self._preempted
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
            is_there = any(each.step == step for each in self._known)
            target = self._folders.target(step, again=is_there)
            self._meet()  # before the first process changes what the others look at
            if self._is_first():
                for each in self._interrupted:
                    self._folders.remove(each)
                self._folders.begin(target, step)
            self._interrupted = [target]
            self._meet()
            with _alone(), naming(f"{self.base_path}{target}"):
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
            saved = Checkpoint(step, max(time.time(), last + 1e-3))  # clocks may be set back
            if self._is_first():
                self._folders.complete(target, saved)
            self._interrupted.clear()
            self._known = [*(each for each in self._known if each.step != step), saved]
            while 0 < self.max_to_keep < len(self._known):
                oldest, *self._known = self._known
                if self._is_first():
                    self._folders.remove(str(oldest.step))

    def _meet(self) -> None:
        if dist.is_initialized():
            dist.barrier(self.pg)

    def _is_first(self) -> bool:
        return not dist.is_initialized() or dist.get_rank(self.pg) == 0

    # ---- what there is

    def all_steps(self) -> list[int]:
        """The steps that can be restored, in order."""
        return sorted(each.step for each in self._known)

    def restore(self, step: int, state_dict: dict[str, Any], *, weights_only: bool = True) -> None:
        """Load a step into the tensors of a state dict, in place; other entries are replaced.

        What is being saved in the background is waited for, so that nothing is removed meanwhile.

        Args:
            step: one of ``all_steps()``.
            state_dict: as it was saved.
            weights_only: as for ``torch.load``. True: nothing runs that the checkpoint names, and entries
                other than tensors may have only objects that ``torch.load`` admits, or that the program
                declares with ``torch.serialization.add_safe_globals``. False: whoever wrote the checkpoint
                can run code.

        Raises:
            AssertionError: there is no such step.
            pickle.UnpicklingError: the checkpoint's metadata names what no metadata has.
            CheckpointException: the checkpoint does not fit the state dict, or an entry is not admitted.
        """
        with self._lock, _alone():
            _check(
                step in self.all_steps(),
                f"Cannot restore from untracked step {step}. Valid steps are: {self.all_steps()}",
            )
            load(
                state_dict,
                storage_reader=(RestrictedReader if weights_only else FsspecReader)(
                    f"{self.base_path}{step}"
                ),
                planner=SPMDLoadPlanner(weights_only=weights_only),
                process_group=self.pg,
                no_dist=not dist.is_initialized(),
            )

    def reached_preemption(self, step: int) -> bool:
        """Whether the engine has announced that it takes the machines away: see ``farcall.preempted``.

        Raises:
            AssertionError: the manager was told not to look.
        """
        _check(
            self.chkpt_on_preemption,
            "Preemption detection not enabled. Please set chkpt_on_preemption when creating the "
            "CheckpointManager",
        )
        return self._preempted

    def _found(self) -> list[Checkpoint]:
        """Return the checkpoints of earlier managers, the oldest first."""
        found, self._interrupted, others = self._folders.found()
        if others:
            _log.warning(
                "Ignoring invalid checkpoints: %s. They were not made by a CheckpointManager, or are "
                "damaged; they stay as they are",
                ", ".join(others),
            )
        if self._interrupted:
            _log.warning(
                "%s: saves that were interrupted. They do not count, and the next save removes them",
                ", ".join(self._interrupted),
            )
        return found


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without PyTorch's warning that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)

"""The ranks of a group, those of them that are gone, and whether the group has failed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from rpc.errors import ForkedProcessError
from spmd.collectives.errors import CollectiveError, RankLostError

__all__ = ["Membership"]


class Membership:
    """The ranks of one group, as one of them sees it. From any thread.

    Args:
        name: name of the group.
        rank: rank of this process.
        workers: name of each rank's worker.
        tell: sends a failure to all others.

    Attributes:
        gone: the reason for each rank that is gone.
        failure: the reason why the group has failed, or None.
    """

    def __init__(
        self, name: str, rank: int, workers: Sequence[str], tell: Callable[[CollectiveError], object]
    ) -> None:
        self.name, self.rank, self.size = name, rank, len(workers)
        self.workers = workers
        self.gone: dict[int, str] = {}
        self._dead: list[int] = []
        self._tell = tell
        self.failure: CollectiveError | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._watchers: list[Callable[[], object]] = []

    def watch(self, watcher: Callable[[], object]) -> None:
        """Call ``watcher``, on any thread, when a rank is gone or the group has failed."""
        self._watchers.append(watcher)

    def describe(self, rank: int) -> str:
        """Describe a rank, for errors."""
        return f"rank {rank} (worker '{self.workers[rank]}')"

    def check(self) -> None:
        """Raise if the group has failed, or belongs to another process."""
        if self.failure is not None:
            raise self.error()
        if os.getpid() != self._process:
            raise ForkedProcessError(
                f"process group '{self.name}' is that of process {self._process}, which this one was forked "
                "from: make a group of its own here"
            )

    def check_rank(self, rank: int) -> None:
        """Raise if the group has failed, or ``rank``, which is awaited, is gone."""
        self.check()
        if rank in self.gone:
            raise RankLostError(f"{self.describe(rank)} is gone: {self.gone[rank]}")

    def check_collective(self, rank: int | None = None) -> None:
        """Raise if the group has failed, or ``rank``, which is awaited, is gone, or any other rank has died,
        so that not all ranks can end a collective.
        """
        for each in self._dead[:1]:
            self.check_rank(each)
        if rank is None:
            self.check()
        else:
            self.check_rank(rank)

    def error(self) -> CollectiveError:
        """Return a new exception with the reason why the group has failed, of the first exception's class."""
        assert self.failure is not None
        return type(self.failure)(f"process group '{self.name}' has failed: {self.failure}")

    @property
    def failed(self) -> bool:
        return self.failure is not None

    @property
    def lost(self) -> bool:
        """Whether a rank has died, or left while others needed it."""
        return bool(self._dead)

    def fail(self, failure: CollectiveError, *, tell: bool = True) -> None:
        """End everything in progress on all ranks. Only the first failure counts.

        Args:
            tell: whether the others must be notified.
        """
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
        if tell:
            self._tell(failure)
        self._notify()

    def leave(self, rank: int, reason: str, *, died: bool = False) -> None:
        """Record that a rank is gone.

        Args:
            died: whether it died before it could say that it takes part no more.
        """
        if died and rank not in self.gone:
            self._dead.append(rank)
        self.gone.setdefault(rank, reason)
        self._notify()

    def _notify(self) -> None:
        for watcher in list(self._watchers):
            watcher()

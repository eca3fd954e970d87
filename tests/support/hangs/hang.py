"""What a hang is, and the registry of all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import rpc
from farcall.observe.installation import observer
from farcall.observe.reading.reader import read_worker
from tests.support.workers import Worker

__all__ = ["ENDS_WITH_PARENT", "HANGS", "LONG", "Hang", "Place", "from_worker0", "hang", "until_seen"]

LONG: Final = 3600.0
"""Duration of a sleep that does not end, in seconds."""

ENDS_WITH_PARENT: Final = "import ctypes, os, time; ctypes.CDLL(None).prctl(1, 9)"
"""Begin of a Python program that is killed when its parent ends."""

Place = tuple[str, int]
"""Name of a file, and a line in it."""


@dataclass(frozen=True)
class Hang:
    """A hang, and what is to be found out.

    Attributes:
        run: what each worker does.
        kind: kinds of the finding, one of which it must have.
        worker: where the culprit is.
        size: number of workers.
        dead_kinds: the same after all workers have been killed, where that is less.
        options: of the agents.
        joins: whether the workers form a group before they run.
        quick: whether it is tested by default.
    """

    run: Callable[[Worker], object]
    kind: tuple[str, ...]
    worker: str = "worker1"
    size: int = 2
    dead_kinds: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    joins: bool = True
    quick: bool = False

    @property
    def name(self) -> str:
        """Name of its function."""
        return self.run.__name__

    @property
    def culprit(self) -> Place:
        """The place that is to be named."""
        return _culprit(self.run)

    def __call__(self, worker: Worker) -> None:
        """Hang."""
        if not self.joins:
            self.run(worker)
            return
        with worker.group(**dict(self.options)):
            worker.report("joined")
            self.run(worker)


HANGS: dict[str, Hang] = {}


def hang(*kind: str, **how: Any) -> Callable[[Callable[[Worker], object]], Callable[[Worker], object]]:
    """A function that hangs on all workers of a group."""

    def add(run: Callable[[Worker], object]) -> Callable[[Worker], object]:
        HANGS[run.__name__] = Hang(run, kind, **how)
        return run

    return add


def _culprit(run: Callable[..., object]) -> Place:
    file = Path(str(sys.modules[run.__module__].__file__))
    lines = file.read_text().splitlines()
    line = next(n for n, line in enumerate(lines, 1) if line.endswith(f"# culprit: {run.__name__}"))
    return file.name, line


def from_worker0(worker: Worker, function: Callable[..., Any], *args: Any) -> None:
    """Worker 0 calls a function of worker 1, without a limit; the others leave."""
    if worker.rank == 0:
        rpc.rpc_sync("worker1", function, args=args, timeout=0)


def until_seen(name: str) -> None:
    """Return when the state file of this process shows a thread at the culprit's place of a hang."""
    found = observer()
    assert found is not None
    culprit = HANGS[name].culprit
    while found.look_now(60.0):
        assert found.path is not None
        places = [each.at for each in read_worker(found.path).threads]
        if culprit in [(Path(at.file).name, at.line) for at in places if at is not None]:
            return
    raise AssertionError("the state file is not written")

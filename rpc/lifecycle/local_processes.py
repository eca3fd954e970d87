"""Workers as processes of this machine, from inside a program: ``spawn``, and ``local_group`` for notebooks.

The processes are started as ``multiprocessing`` does with *spawn*: each is a new Python that imports the
program's script under another name, so the code that starts them must be under ``if __name__ ==
"__main__":``. Functions of a notebook are sent by value. The processes end with this one, however it ends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from rpc.errors import AlreadyInitializedError
from rpc.group.workers import check_name
from rpc.lifecycle.startup import init_rpc
from rpc.lifecycle.worker_processes import WorkerProcesses
from rpc.options import AgentOptions
from rpc.runtime.current import current_agent, is_initialized

__all__ = ["LocalGroup", "local_group", "spawn", "worker_names"]


def spawn(main: Callable[..., Any], *args: Any, workers: int | Sequence[str] = 2) -> list[Any]:
    """Run a function on new workers, one process each, on this machine, and wait until all have returned.

    Each process joins the group, calls ``main(*args)``, and leaves gracefully, so that a worker whose
    function has returned serves the others until all have returned. If one fails, the others are ended.

    Args:
        main: function that each worker runs; it can find out which one by ``rpc.get_worker_info()``.
        args: arguments of ``main``.
        workers: number of workers; they are called ``worker0``, ``worker1`` and so on. Or their names, by
            rank.

    Returns:
        The return values of ``main``, by rank.

    Raises:
        RpcError: a worker failed; the text names it and has its traceback. ``__cause__`` is its exception.
        SystemExit: raised by a worker's ``main``, if its status is not 0.

    Example::

        def main():
            if rpc.get_worker_info().id == 0:
                print(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)))

        if __name__ == "__main__":
            rpc.spawn(main, workers=2)
    """
    names = worker_names(workers)
    with WorkerProcesses(names, world_size=len(names)) as processes, _terminated_like_interrupted():
        processes.start(main, args)
        return processes.results()


@dataclass(frozen=True, slots=True)
class LocalGroup:
    """The group that ``local_group`` has started.

    Attributes:
        names: names of the workers that it started, by rank.
        me: name of this process as a worker; its rank comes after theirs.
    """

    names: tuple[str, ...]
    me: str

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)


@contextlib.contextmanager
def local_group(
    workers: int | Sequence[str] = 2, *, name: str = "main", options: AgentOptions | None = None
) -> Iterator[LocalGroup]:
    """Start workers on this machine that serve inside the block; this process joins them. For notebooks and
    tests.

    Args:
        workers: number of workers; they are called ``worker0``, ``worker1`` and so on. Or their names, by
            rank.
        name: name of this process as a worker; its rank comes after theirs.
        options: options of the agents; ``init_method`` is set. Default: as for ``init_rpc``.

    Raises:
        AlreadyInitializedError: this process is a worker already.
        RpcError: a worker did not start.

    Example::

        with rpc.local_group(4) as group:
            for each in group:
                print(rpc.rpc_sync(each, os.getpid))
    """
    if is_initialized():
        raise AlreadyInitializedError("this process is a worker already: call rpc.shutdown() first")
    names = worker_names(workers)
    with WorkerProcesses(names, world_size=len(names) + 1, options=options) as processes:
        processes.start(_serve, ())
        processes.started()
        init_rpc(name, rank=len(names), world_size=len(names) + 1, rpc_backend_options=processes.options())
        try:
            yield LocalGroup(names, name)
        except BaseException:
            if is_initialized():
                current_agent().shutdown(graceful=False)
            raise
        if is_initialized():
            current_agent().shutdown()
        processes.results()


def _serve() -> None:
    """The main function of a worker of a local group; the others call it until it may leave."""


def worker_names(workers: int | Sequence[str]) -> tuple[str, ...]:
    """Return the names by rank: those given, or ``worker0``, ``worker1`` and so on for a number."""
    if isinstance(workers, str | bool) or not isinstance(workers, int | Sequence):
        raise TypeError(f"workers is a number or a list of names, not {workers!r}")
    names = [f"worker{rank}" for rank in range(workers)] if isinstance(workers, int) else list(workers)
    if not names:
        raise ValueError(f"there must be at least one worker, not {workers}")
    for name in names:
        check_name(name)
        if names.count(name) > 1:
            raise ValueError(f"worker names must be unique: {name!r} occurs {names.count(name)} times")
    return tuple(names)


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """End the workers on SIGTERM, as on ``KeyboardInterrupt``."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""``farcall launch``: all workers of a program on this machine, or this machine's part of them.

Each worker finds its rank and addresses in the environment (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and so
on, as under torchrun), which ``init_rpc`` uses by default. On the terminal there is one line that says which
ranks run here and where they meet, the rank before each line of output, and one summary of the failure that
came first, with its traceback.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from farcall.launch.dynamic_group import DynamicGroup
from farcall.launch.job import Job
from farcall.launch.output import Output
from farcall.launch.processes import Guard, WorkerProcess
from farcall.launch.rounds import Order
from farcall.launch.signals import ENDING, received_in
from farcall.launch.spares import Spares
from farcall.launch.static_group import StaticGroup
from farcall.launch.terminal import say
from farcall.launch.watch import JobWatch
from farcall_guard import hides_farcall
from rpc.errors import RendezvousError
from rpc.runtime.cpu_quota import usable_cores

__all__ = ["launch"]

_LOOK_SECONDS: Final = 0.05
_FLAGS_AT: Final = 3
"""Index of the first flag in the command of a worker."""


def launch(
    job: Job, target: str, arguments: Sequence[str], *, module: bool, lend_names: bool, xla: bool = False
) -> int:
    """Run a program in all processes of this machine, and wait for their end.

    Args:
        job: number of processes, and their meeting place.
        target: a script, or with ``module`` the name of a module.
        arguments: arguments of the program.
        module: whether to run it like ``python -m``.
        lend_names: whether ``torch.distributed.rpc`` means farcall, as with ``farcall run``.
        xla: whether libraries find ``torch_xla``, as with ``farcall run --xla``.

    Returns:
        The exit status: 0 if all processes succeeded, otherwise that of the one that failed first; 128 plus
            the signal's number if a signal ended it; 2 if the program cannot be started.
    """
    hidden = None if os.environ.get("PYTHONSAFEPATH") else hides_farcall("")
    if hidden is not None:
        say(f"{hidden} has farcall's name, so that `import farcall` here means that: rename it")
        return 2
    gc.freeze()  # the collection at the end need not visit what PyTorch has made at its import
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // job.workers)))

    os.environ["PYTHONUNBUFFERED"] = "1"
    if job.dynamic:
        os.environ.pop("WORLD_SIZE", None)
    given = {"--lend-names": lend_names, "--xla": xla, "-m": module}
    flags = [flag for flag, is_given in given.items() if is_given]
    command = [sys.executable, "-m", "farcall.launch.worker_main", *flags, target, *arguments]
    logging.getLogger("rpc").addHandler(_OnTerminal(logging.WARNING))
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="farcall-") as folder, received_in(news):
        try:
            output = Output(None if job.log_dir is None else Path(job.log_dir))
        except OSError as error:
            say(f"cannot write to --log-dir {job.log_dir}: {error.strerror}")
            return 2
        guard = None if job.outlive else Guard(job.grace)

        def make(rank: int, host: str) -> WorkerProcess:
            return WorkerProcess(rank, command, Path(folder), output, guard, host=host)

        watch = JobWatch(job, os.path.basename(target))
        group: DynamicGroup | StaticGroup
        if job.dynamic:
            spares = Spares(job.spares, command, _FLAGS_AT, guard) if job.spares and guard else None
            group = DynamicGroup(job, make, news, watch, spares)
        else:
            group = StaticGroup(job, make, news, watch)
        try:
            end = group.run()
        except RendezvousError as error:
            say(str(error))
            return 1
        finally:
            if guard is not None:
                guard.close()
            output.close()
            _wait_for_output(output, news)
            watch.close()
    status = _sum_up(job, end)
    watch.ended(status, end.failure)
    if end.failure is not None:
        watch.explain(end.failure)
    # A thread waits in C++ for a store that does not answer: Python's shutdown would abort.
    if not group.let_go:
        os._exit(status)
    return status


def _wait_for_output(output: Output, news: queue.SimpleQueue[Any]) -> None:
    """Wait until all output has been written; a signal ends the wait, since the reader may be gone."""
    while not output.closed.wait(_LOOK_SECONDS):
        while not news.empty():
            if news.get() in ENDING:
                return


def _sum_up(job: Job, end: Order) -> int:
    if end.failure is not None:
        end.failure.sum_up(f", and no restart of {job.restarts} is left" if job.restarts else "")
    return end.status


class _OnTerminal(logging.Handler):
    """Log lines of the rendezvous, as lines of the launcher's own."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())

"""``farcall launch``: all workers of a program on this machine, or this machine's part of them.

torchrun's elastic agent starts and watches the processes, and gives each its place in the environment
(``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and so on), where ``init_rpc`` looks by default. What is added
here: one line for who runs where, the rank before each line of output, and one summary of the failure that
came first, with its traceback. Dynamic groups are watched worker by worker (``supervising``).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any, Final

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from farcall.job import Job
from farcall.reporting import Failure, name_ranks, say
from farcall.supervising import supervise
from rpc import errors
from rpc.rendezvous.address import is_here, listen_address, may_be_known_soon, unknown_host
from rpc.runtime.cpu_quota import usable_cores
from rpc.runtime.notices import Notices

__all__ = ["launch"]

_SHUTDOWN_SECONDS: Final = 5
_MEET_SECONDS: Final = 900
_LOOK_SECONDS: Final = 0.2


def launch(
    job: Job, target: str, arguments: Sequence[str], *, module: bool, lend_names: bool, xla: bool = False
) -> int:
    """Run a program in all processes of this machine, and wait for their end.

    Args:
        job: how many there are, and where they meet.
        target: a script, or with ``module`` the name of one.
        arguments: the program's own.
        module: as ``python -m``.
        lend_names: ``torch.distributed.rpc`` means farcall, as with ``farcall run``.
        xla: libraries find ``torch_xla``, as with ``farcall run --xla``.

    Returns:
        The exit status: 0 if all processes succeeded, else that of the one that failed first; 128 and the
        signal's number if a signal ended it.
    """
    if logging.getLogger("rpc").getEffectiveLevel() > logging.DEBUG:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // job.workers)))
    os.environ["PYTHONUNBUFFERED"] = "1"
    if job.dynamic:
        os.environ.pop("WORLD_SIZE", None)
    given = {"--lend-names": lend_names, "--xla": xla, "-m": module}
    flags = [flag for flag, is_given in given.items() if is_given]
    command = [sys.executable, "-m", "farcall.worker", *flags, target, *arguments]
    run = supervise if job.dynamic else _run_as_one
    remark = f", and no restart of {job.restarts} is left" if job.restarts else ""
    with tempfile.TemporaryDirectory(prefix="farcall-") as folder:
        try:
            _check_name(job)
            failure = run(job, command, folder)
        except (SignalException, KeyboardInterrupt) as end:
            number = end.sigval if isinstance(end, SignalException) else signal.SIGINT
            say(f"ended by {signal.Signals(number).name}")
            return 128 + int(number)
        except RendezvousError as error:
            reason = error.__cause__ or error  # the error itself says only that there is a cause
            say(
                f"the rendezvous at {job.rdzv} has failed: {reason}. Check that all machines can reach it, "
                f"and that its port is not another program's."
            )
            return 1
        except errors.RendezvousError as error:
            say(str(error))
            return 1
    if failure is None:
        return 0
    failure.sum_up(remark)
    return failure.exit_status


def _check_name(job: Job) -> None:
    """Raise if --rdzv names no host. (torchrun goes on asking for a quarter of an hour.)"""
    host = job.rdzv.rpartition(":")[0]
    try:
        socket.getaddrinfo(host or None, 0)
    except (socket.gaierror, UnicodeError) as error:
        if not may_be_known_soon(error):
            raise unknown_host(host, "--rdzv", error) from error


def _run_as_one(job: Job, command: Sequence[str], folder: str) -> Failure | None:
    """All processes are one unit: when one fails, all are ended, and perhaps started again."""
    logs = _Logs(folder)
    threading.Thread(target=_tell_of_waiting, args=(job, logs), daemon=True).start()
    try:
        elastic_launch(_config(job, logs), command[0])(*command[1:])
    except ChildFailedError as error:
        return Failure.first(
            Failure.of(rank, each.pid, each.exitcode, each.timestamp, each.error_file)
            for rank, each in error.failures.items()
        )
    finally:
        logs.begun.set()
    return None


def _config(job: Job, logs: DefaultLogsSpecs) -> LaunchConfig:
    static = job.node_rank is not None and job.nodes > 1
    host = job.rdzv.rpartition(":")[0]
    meeting: dict[str, Any] = {"timeout": _MEET_SECONDS, "read_timeout": _MEET_SECONDS}
    if static:
        meeting["rank"] = job.node_rank
    elif host:
        # torchrun looks whether this host's name means that address, which on many it does not.
        meeting["is_host"] = is_here(host)
    return LaunchConfig(
        min_nodes=job.nodes,
        max_nodes=job.nodes,
        nproc_per_node=job.workers,
        run_id=job.name if job.nodes > 1 else f"{job.name}-{os.getpid()}",
        rdzv_backend="static" if static else "c10d",
        rdzv_endpoint=job.rdzv or "localhost:0",
        rdzv_configs=meeting,
        max_restarts=job.restarts,
        monitor_interval=0.1,
        logs_specs=logs,
        log_line_prefix_template="[${rank}] ",
        shutdown_timeout=_SHUTDOWN_SECONDS,
        # Not this host's name, torchrun's default, which others may not know.
        local_addr=listen_address(host or None)[0],
    )


class _Logs(DefaultLogsSpecs):
    """Both streams of each process to the terminal; says when the processes start.

    Attributes:
        begun: they have been started.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(log_dir=folder, tee=Std.ALL)
        self.begun = threading.Event()

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent for each start of all processes."""
        self.begun.set()
        ranks = sorted(int(env["RANK"]) for env in envs.values())
        first = next(iter(envs.values()))
        again = first.get("TORCHELASTIC_RESTART_COUNT", "0")
        say(
            f"{name_ranks(ranks)} of {first['WORLD_SIZE']} run here; they meet at {first['MASTER_ADDR']}:"
            f"{first['MASTER_PORT']}{f' (restart {again})' if again != '0' else ''}"
        )
        return super().reify(envs)


def _tell_of_waiting(job: Job, logs: _Logs) -> None:
    notices = Notices()
    while not logs.begun.wait(_LOOK_SECONDS):
        if notices.due():
            which = "" if job.node_rank is None else f", this is number {job.node_rank}"
            say(
                f"waiting at {job.rdzv} for {job.nodes} machines for {notices.waited}{which}. If all have "
                f"been started, `farcall doctor --meet {job.rdzv}` on two says what is in the way"
            )

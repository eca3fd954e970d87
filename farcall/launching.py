"""``farcall launch``: all workers of a program on this machine, or this machine's part of them.

torchrun's elastic agent starts and watches the processes, and gives each its place in the environment
(``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and so on), where ``init_rpc`` looks by default. What is added
here: one line for who runs where, the rank before each line of output, and one summary of the failure that
came first, with its traceback.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rpc.runtime.cpu_quota import usable_cores
from rpc.runtime.notices import Notices

__all__ = ["Job", "launch", "slurm_hosts", "under_slurm"]

_PORT: Final = 29500
_SHUTDOWN_SECONDS: Final = 5
_LOOK_SECONDS: Final = 0.2
_LOST: Final = "WorkerLostError"


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be launched, and this machine's part in it.

    Attributes:
        workers: how many processes run on this machine.
        nodes: how many machines take part.
        node_rank: which of them this is; None if that does not matter.
        rdzv: HOST:PORT where the machines meet, served by the one that has this name; "" on one machine.
        restarts: how often all workers are started again when one fails.
        name: the same on all machines, and another for another job.
    """

    workers: int
    nodes: int = 1
    node_rank: int | None = None
    rdzv: str = ""
    restarts: int = 0
    name: str = "farcall"


def under_slurm(workers: int, environ: Mapping[str, str], **given: Any) -> Job:
    """The job as Slurm describes it, where one ``farcall launch`` runs on each of its nodes (``srun
    --ntasks-per-node=1 farcall launch ...``). What is ``given`` counts before that.
    """
    nodes = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    found: dict[str, Any] = {}
    if nodes > 1 and "SLURM_NODEID" in environ:
        job = int(environ["SLURM_JOB_ID"])
        first = slurm_hosts(environ["SLURM_JOB_NODELIST"])[0]
        # Jobs that share a node must not meet at one port.
        found = {"nodes": nodes, "node_rank": int(environ["SLURM_NODEID"]), "name": f"slurm-{job}"}
        found["rdzv"] = f"{first}:{_PORT + 1 + job % 10000}"
    return Job(workers, **found | {name: value for name, value in given.items() if value is not None})


def slurm_hosts(nodes: str) -> list[str]:
    """The hosts of a list in Slurm's notation: ``node[01-03,7],gpu1``."""
    hosts: list[str] = []
    for item in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", nodes):
        found = [""]
        for text, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", item):
            found = [f"{prefix}{text}{number}" for prefix in found for number in _numbers(ranges)]
        hosts += found
    return hosts


def _numbers(ranges: str) -> list[str]:
    """``01-03,7`` as ``01 02 03 7``; of an empty text an empty one."""
    found: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        width = len(first)
        found += [f"{n:0{width}}" for n in range(int(first), int(last) + 1)] if dash else [part]
    return found


def launch(job: Job, target: str, arguments: Sequence[str], *, module: bool, lend_names: bool) -> int:
    """Run a program in all processes of this machine, and wait for their end.

    Args:
        job: how many there are, and where they meet.
        target: a script, or with ``module`` the name of one.
        arguments: the program's own.
        module: as ``python -m``.
        lend_names: ``torch.distributed.rpc`` means farcall, as with ``farcall run``.

    Returns:
        The exit status: 0 if all processes succeeded, else that of the one that failed first; 128 and the
        signal's number if a signal ended it.
    """
    if logging.getLogger("rpc").getEffectiveLevel() > logging.DEBUG:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // job.workers)))
    os.environ["PYTHONUNBUFFERED"] = "1"
    flags = [*(["--lend-names"] if lend_names else []), *(["-m"] if module else [])]
    command = [sys.executable, "-m", "farcall.worker", *flags, target, *arguments]
    with tempfile.TemporaryDirectory(prefix="farcall-") as folder:
        logs = _Logs(folder)
        threading.Thread(target=_tell_of_waiting, args=(job, logs), daemon=True).start()
        try:
            elastic_launch(_config(job, logs), command[0])(*command[1:])
        except ChildFailedError as error:
            return _tell_of_failure(error, Path(folder))
        except (SignalException, KeyboardInterrupt) as end:
            number = end.sigval if isinstance(end, SignalException) else signal.SIGINT
            _say(f"ended by {signal.Signals(number).name}")
            return 128 + int(number)
        except RendezvousError as error:
            _say(f"the {job.nodes} machines could not meet at {job.rdzv}: {error}")
            return 1
        finally:
            logs.begun.set()
    return 0


def _config(job: Job, logs: DefaultLogsSpecs) -> LaunchConfig:
    static = job.node_rank is not None and job.nodes > 1
    return LaunchConfig(
        min_nodes=job.nodes,
        max_nodes=job.nodes,
        nproc_per_node=job.workers,
        run_id=job.name if job.nodes > 1 else f"{job.name}-{os.getpid()}",
        rdzv_backend="static" if static else "c10d",
        rdzv_endpoint=job.rdzv or "localhost:0",
        rdzv_configs={"rank": job.node_rank, "timeout": 900} if static else {"timeout": 900},
        max_restarts=job.restarts,
        monitor_interval=0.1,
        logs_specs=logs,
        log_line_prefix_template="[${rank}] ",
        shutdown_timeout=_SHUTDOWN_SECONDS,
        local_addr="127.0.0.1" if job.nodes == 1 else None,
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
        here = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        again = first.get("TORCHELASTIC_RESTART_COUNT", "0")
        _say(
            f"{here} of {first['WORLD_SIZE']} run here; they meet at {first['MASTER_ADDR']}:"
            f"{first['MASTER_PORT']}{f' (restart {again})' if again != '0' else ''}"
        )
        return super().reify(envs)


def _tell_of_waiting(job: Job, logs: _Logs) -> None:
    notices = Notices()
    while not logs.begun.wait(_LOOK_SECONDS):
        if notices.due():
            which = "" if job.node_rank is None else f", this is number {job.node_rank}"
            _say(f"waiting at {job.rdzv} for {job.nodes} machines for {notices.waited}{which}")


def _tell_of_failure(error: ChildFailedError, folder: Path) -> int:
    """Print one summary; returns the exit status."""
    _, first = error.get_first_failure()
    ranks = {failure.pid: rank for rank, failure in error.failures.items()}
    rank, exit_code, pid, message, trace = ranks.get(first.pid, 0), first.exitcode, first.pid, "", ""
    killed = [
        each for each in error.failures.values() if each.exitcode < 0 and each.exitcode != -signal.SIGTERM
    ]
    if killed:
        rank, exit_code, pid = ranks[killed[0].pid], killed[0].exitcode, killed[0].pid
    else:
        # What each has left behind when it raised; that another was lost is seldom the cause.
        raised = sorted(
            map(_Raised.read, folder.rglob("error.json")), key=lambda each: (each.is_loss, each.at)
        )
        if raised:
            message, trace = raised[0].message, raised[0].trace
            exit_code, pid, rank = 1, raised[0].pid, raised[0].rank
    how = (
        f"was killed by {signal.Signals(-exit_code).name}"
        if exit_code < 0
        else f"ended with status {exit_code}"
    )
    _say(f"rank {rank} (process {pid}) failed first: it {f'raised {message}' if message else how}")
    if trace:
        print(trace.rstrip(), file=sys.stderr, flush=True)
    return exit_code if exit_code > 0 else 128 - exit_code


@dataclass(frozen=True, slots=True)
class _Raised:
    """What one process has raised."""

    rank: int
    pid: int
    at: float
    message: str
    trace: str

    @property
    def is_loss(self) -> bool:
        return self.message.startswith(_LOST)

    @classmethod
    def read(cls, file: Path) -> _Raised:
        return cls(**json.loads(file.read_text()))


def record(error: BaseException, trace: str) -> None:
    """In a process: leave behind what it has raised, where its launcher looks."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
        left = {"rank": int(os.environ["RANK"]), "pid": os.getpid(), "at": time.time(), "message": said}
        written = Path(f"{file}.{os.getpid()}")
        try:
            written.write_text(json.dumps(left | {"trace": trace}))
            written.replace(file)  # as a whole: this process may be ended at any moment
        except OSError as failure:  # what was raised is shown all the same
            _say(f"cannot write {written} for the launcher: {failure.strerror}")


def _say(text: str) -> None:
    print(f"farcall: {text}", file=sys.stderr, flush=True)

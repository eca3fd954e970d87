"""What ``farcall launch`` is to launch, as the command line and Slurm tell."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Job", "slurm_hosts", "under_slurm"]

_PORT: Final = 29500


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be launched, and this machine's part in it.

    Attributes:
        workers: number of processes on this machine.
        nodes: number of machines that take part.
        node_rank: rank of this machine; None if that does not matter.
        rdzv: HOST:PORT where the machines meet, served by the one that has this name; "" on one machine.
        restarts: how often all workers are started again when one fails; of a dynamic group, how often any
            one of this machine's is, while the others go on.
        dynamic: workers come and go: none waits for the others, and each may be started again alone.
        name: name of the job, the same on all machines.
        grace: seconds from the signal that ends a worker to SIGKILL.
        timeout: seconds to wait for the other machines.
        log_dir: folder for a file with the output of each rank; None: there are none.
        outlive: workers keep running if their launcher is killed.
    """

    workers: int
    nodes: int = 1
    node_rank: int | None = None
    rdzv: str = ""
    restarts: int = 0
    dynamic: bool = False
    name: str = "farcall"
    grace: float = 30.0
    timeout: float = 900.0
    log_dir: str | None = None
    outlive: bool = False

    @property
    def run_id(self) -> str:
        """What separates this job from others at one store."""
        return self.name if self.nodes > 1 else f"{self.name}-{os.getpid()}"


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

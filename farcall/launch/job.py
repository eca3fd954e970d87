"""The job that ``farcall launch`` launches, from the command line and from Slurm."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rpc.rendezvous.engines import slurm_hosts, slurm_port

__all__ = ["Job", "under_slurm"]


@dataclass(frozen=True, slots=True)
class Job:
    """A job, and this machine's part in it.

    Attributes:
        workers: number of processes on this machine.
        nodes: number of machines that take part.
        node_rank: rank of this machine; None if any will do.
        rdzv: HOST:PORT where the machines meet, served by the machine that has this name; "" on one machine.
        restarts: maximum number of restarts of all workers; in a dynamic group, total number of them on this
            machine, while the others go on.
        dynamic: whether workers come and go: none waits for the others, and each may be restarted alone.
        name: name of the job, the same on all machines.
        grace: time in seconds from the signal that ends a worker to SIGKILL.
        timeout: time in seconds to wait for the other machines.
        log_dir: folder for a file with the output of each rank; None for no files.
        outlive: whether workers continue to run if their launcher is killed.
        page: whether to serve the page of the job.
        spares: number of processes that wait to take the place of a worker that fails, in a dynamic group.
        replica: number of workers that are restarted together if one fails, in a dynamic group.
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
    page: bool = False
    spares: int = 0
    replica: int = 1

    @property
    def run_id(self) -> str:
        """Name that separates this job from others at one store."""
        return self.name if self.nodes > 1 else f"{self.name}-{os.getpid()}"


def under_slurm(workers: int, environ: Mapping[str, str], **given: Any) -> Job:
    """Return the job as Slurm describes it, if one ``farcall launch`` runs on each node of a step (``srun
    --ntasks-per-node=1 farcall launch ...``). What is ``given`` has precedence.

    Raises:
        ValueError: the step does not run one launcher on each node; says how to start it.
    """
    found: dict[str, Any] = {}
    if "SLURM_JOB_ID" in environ:
        mistake, found = _slurm_step(environ)
        if mistake and given.get("nodes") is None:
            raise ValueError(mistake)
    return Job(workers, **found | {name: value for name, value in given.items() if value is not None})


def _slurm_step(environ: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return machines, rank and meeting place, from the variables of the step, which may be smaller than the
    job; and the reason why they are not usable, or "".
    """
    job, step = environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID")
    nodes = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    hosts, mistake = slurm_hosts(environ.get("SLURM_JOB_NODELIST", "")), ""
    if step is None:
        mistake = (
            f"this runs on one of the {nodes} nodes of Slurm's job {job}, in no step. Start it on all by "
            "`srun --ntasks-per-node=1 farcall launch ...`, or give --nnodes 1 for this one alone"
        )
    elif "SLURM_HET_SIZE" not in environ:  # otherwise the step's variables are those of one component
        nodes = int(environ.get("SLURM_STEP_NUM_NODES") or nodes)
        hosts = slurm_hosts(environ.get("SLURM_STEP_NODELIST", "")) or hosts
        tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or nodes)
        if tasks != nodes:
            return (
                f"step {job}.{step} of Slurm runs {tasks} launchers on {nodes} nodes. There must be one on "
                "each, which starts the workers there: srun --ntasks-per-node=1 farcall launch -n WORKERS ..."
            ), {}
    if nodes == 1 or mistake:
        return mistake if nodes > 1 else "", {}
    rank, name = int(environ["SLURM_NODEID"]), f"slurm-{job}.{step}"
    return "", {"nodes": nodes, "node_rank": rank, "rdzv": f"{hosts[0]}:{slurm_port(environ)}", "name": name}

"""What ``farcall launch`` is to launch, as the command line and Slurm tell."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rpc.rendezvous.engines import slurm_hosts, slurm_port

__all__ = ["Job", "under_slurm"]


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
        page: serve the page of the job.
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

    @property
    def run_id(self) -> str:
        """What separates this job from others at one store."""
        return self.name if self.nodes > 1 else f"{self.name}-{os.getpid()}"


def under_slurm(workers: int, environ: Mapping[str, str], **given: Any) -> Job:
    """The job as Slurm describes it, where one ``farcall launch`` runs on each node of a step (``srun
    --ntasks-per-node=1 farcall launch ...``). What is ``given`` counts before that.

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
    """Machines, rank and meeting place, by the variables of the step, which may be smaller than the job; and
    why they cannot be, else "".
    """
    job, step = environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID")
    nodes = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    hosts, mistake = slurm_hosts(environ.get("SLURM_JOB_NODELIST", "")), ""
    if step is None:
        mistake = (
            f"this runs on one of the {nodes} nodes of Slurm's job {job}, in no step. Start it on all by "
            "`srun --ntasks-per-node=1 farcall launch ...`, or give --nnodes 1 for this one alone"
        )
    elif "SLURM_HET_SIZE" not in environ:  # else the step's variables are those of one component
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

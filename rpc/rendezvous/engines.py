"""A worker's rank and meeting place, from the variables that its engine sets: Slurm's ``srun``, ``mpirun``,
and Kubeflow's trainer.
These variables are read if neither the program nor ``RANK`` gives the rank. They are translated into the
variables that torchrun sets, which the rest of the rendezvous reads. Some engines set ranks but no meeting
place; the error then names the engine and the option that sets one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rpc.errors import RendezvousError

__all__ = ["Engine", "engine_of", "placed_by_engine", "slurm_hosts", "slurm_port"]

_FIRST_PORT: Final = 29501
_PORTS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Engine:
    """The values of an engine's variables for a worker.

    Attributes:
        name: name of the engine, for errors.
        rank: rank of the worker.
        world_size: number of workers.
        local_rank: rank on its host; None if the engine does not say.
        local_world_size: number of workers on its host; None likewise.
        master: host and port where the workers meet; None if the engine does not say.
        remedy: how to give such a place.
    """

    name: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    master: tuple[str, int] | None = None
    remedy: str = ""


def placed_by_engine(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return an environment with ``RANK``, ``WORLD_SIZE`` and so on, if an engine's variables contain them.

    Variables that are set take precedence: nothing is changed if ``RANK`` or ``WORLD_SIZE`` is set.
    """
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return environ
    engine = engine_of(environ)
    if engine is None:
        return environ
    found = {"RANK": str(engine.rank), "WORLD_SIZE": str(engine.world_size)}
    if engine.local_rank is not None:
        found["LOCAL_RANK"] = str(engine.local_rank)
    if engine.local_world_size is not None:
        found["LOCAL_WORLD_SIZE"] = str(engine.local_world_size)
    if engine.master is not None:
        found["MASTER_ADDR"], found["MASTER_PORT"] = engine.master[0], str(engine.master[1])
    return found | {name: value for name, value in environ.items() if value}


def engine_of(environ: Mapping[str, str]) -> Engine | None:
    """Return the engine that has started this process, or None if it is not one of those known here.

    Raises:
        RendezvousError: its variables are malformed.
    """
    try:
        for read in (_kubeflow, _open_mpi, _hydra, _slurm):  # under Slurm, mpirun has the variables of both
            engine = read(environ)
            if engine is not None:
                return engine
    except (KeyError, ValueError) as error:
        raise RendezvousError(
            f"the environment is not what an engine sets: {error}. Pass rank= and world_size= to init_rpc, "
            "or set RANK and WORLD_SIZE."
        ) from error
    if environ.get("PMIX_RANK"):
        raise RendezvousError(
            f"this process was started through PMIx (PMIX_RANK={environ['PMIX_RANK']}), which tells programs "
            "no size by variables. Set WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT, or pass them to init_rpc."
        )
    return None


def _kubeflow(environ: Mapping[str, str]) -> Engine | None:
    """Read the variables of a pod of Kubeflow's PyTorchJob or TrainJob, which are meant for torchrun."""
    if "PET_NODE_RANK" not in environ or "PET_NNODES" not in environ:
        return None
    processes = environ.get("PET_NPROC_PER_NODE", "1")
    if processes not in ("1", "auto", "cpu", "gpu"):
        raise RendezvousError(
            f"PET_NPROC_PER_NODE={processes} asks for {processes} processes on each node, and this one was "
            "started without a launcher: start the program by `farcall launch` or torchrun"
        )
    host, port = environ.get("PET_MASTER_ADDR"), environ.get("PET_MASTER_PORT") or "29500"
    if not host and environ.get("PET_RDZV_ENDPOINT"):
        host, _, port = environ["PET_RDZV_ENDPOINT"].rpartition(":")
    nodes = environ["PET_NNODES"].partition(":")[0]
    return Engine(
        "Kubeflow",
        int(environ["PET_NODE_RANK"]),
        int(nodes),
        0,
        1,
        (host, int(port)) if host else None,
        "PET_MASTER_ADDR is not set: set MASTER_ADDR and MASTER_PORT to the first pod's name and a port",
    )


def _open_mpi(environ: Mapping[str, str]) -> Engine | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    return Engine(
        "OpenMPI's mpirun",
        int(environ["OMPI_COMM_WORLD_RANK"]),
        int(environ["OMPI_COMM_WORLD_SIZE"]),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        None,
        "give the host of rank 0: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...",
    )


def _hydra(environ: Mapping[str, str]) -> Engine | None:
    """Read the variables of Hydra, the launcher of MPICH, Intel MPI and others."""
    if "PMI_RANK" not in environ or "PMI_SIZE" not in environ:
        return None
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        return None  # srun --mpi=pmi2 sets them too, and its own variables contain more
    return Engine(
        "mpiexec (PMI)",
        int(environ["PMI_RANK"]),
        int(environ["PMI_SIZE"]),
        _number(environ, "MPI_LOCALRANKID"),
        _number(environ, "MPI_LOCALNRANKS"),
        None,
        "give the host of rank 0: mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 ...",
    )


def _slurm(environ: Mapping[str, str]) -> Engine | None:
    """Read the variables of a step's task. (A batch script has some of these variables, but is not
    a task.)
    """
    if "SLURM_STEP_ID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    hosts = slurm_hosts(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environ, "SLURM_NODEID")
    return Engine(
        "srun",
        int(environ["SLURM_PROCID"]),
        int(environ["SLURM_STEP_NUM_TASKS"]),
        _number(environ, "SLURM_LOCALID"),
        tasks[node] if node is not None and node < len(tasks) else None,
        (hosts[0], slurm_port(environ)),
    )


def _tasks_per_node(text: str) -> list[int]:
    """Parse Slurm's ``2(x3),1`` into 2, 2, 2, 1."""
    found: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(tasks)] * int(nodes or 1)
    return found


def _number(environ: Mapping[str, str], name: str) -> int | None:
    return int(environ[name]) if environ.get(name) else None


def slurm_port(environ: Mapping[str, str]) -> int:
    """Return the port where the tasks of a step meet: different for each job, and for each step of a job."""
    job, step = int(environ["SLURM_JOB_ID"]), int(environ.get("SLURM_STEP_ID") or 0)
    return _FIRST_PORT + (job + 101 * step) % _PORTS


def slurm_hosts(nodes: str) -> list[str]:
    """Return the hosts of a list in Slurm's notation: ``node[01-03,7],gpu1``."""
    hosts: list[str] = []
    for item in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", nodes):
        found = [""]
        for text, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", item):
            found = [f"{prefix}{text}{number}" for prefix in found for number in _numbers(ranges)]
        hosts += found
    return hosts


def _numbers(ranges: str) -> list[str]:
    """Expand ``01-03,7`` to ``01 02 03 7``; an empty text to one empty text."""
    found: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        width = len(first)
        found += [f"{n:0{width}}" for n in range(int(first), int(last) + 1)] if dash else [part]
    return found

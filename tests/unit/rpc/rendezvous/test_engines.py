"""A worker's place by the variables of the engines that start it."""

from __future__ import annotations

import pytest

from rpc.errors import RendezvousError
from rpc.rendezvous.engines import placed_by_engine, slurm_hosts
from rpc.rendezvous.init_method import open_store, resolve_group
from tests.support.engine_environments import (
    HYDRA,
    KUBEFLOW,
    OPEN_MPI_4,
    OPEN_MPI_5,
    PRRTE,
    SBATCH,
    SRUN,
    SRUN_PMI2,
    SRUN_SMALLER_STEP,
    TORCHRUN,
)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (SRUN, "3 4 0 1 node1 29503"),
        (SRUN_PMI2, "3 4 0 1 node1 29503"),
        (SRUN_SMALLER_STEP, "2 3 0 1 node2 29505"),
        (SRUN_SMALLER_STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "2 3 0 2 node2 29505"),
        (OPEN_MPI_4, "3 4 1 2 - -"),
        (OPEN_MPI_5, "3 4 3 4 - -"),
        (OPEN_MPI_4 | {"MASTER_ADDR": "head", "MASTER_PORT": "1"}, "3 4 1 2 head 1"),
        (SRUN | OPEN_MPI_4, "3 4 1 2 - -"),
        (HYDRA, "3 4 1 2 - -"),
        (KUBEFLOW, "1 2 0 1 train-node-0-0.train 29400"),
        (TORCHRUN, "1 2 1 2 localhost 43163"),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "2"}, "0 2 - - a 2"),
        (SBATCH, "- - - - - -"),
        ({}, "- - - - - -"),
    ],
)
def test_each_engines_variables_are_read(environ: dict[str, str], place: str) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = placed_by_engine(environ)
    assert " ".join(found.get(name, "-") for name in names) == place


def test_all_tasks_of_a_step_on_one_node_are_known_to_be_there() -> None:
    one_node = {"SLURM_STEP_NODELIST": "node2", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "4"}
    place = resolve_group(None, None, placed_by_engine(SRUN | one_node))
    assert place.single_host


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (OPEN_MPI_5, "started by OpenMPI's mpirun, .*MASTER_ADDR is not set.*mpirun -x MASTER_ADDR=HOST"),
        (HYDRA, "started by mpiexec .*-genv MASTER_ADDR HOST"),
        ({name: KUBEFLOW[name] for name in KUBEFLOW if "MASTER" not in name}, "Kubeflow, .*PET_MASTER_ADDR"),
    ],
)
def test_where_a_meeting_place_is_missing_the_error_names_engine_and_variable(
    environ: dict[str, str], said: str
) -> None:
    with pytest.raises(RendezvousError, match=said):
        open_store("env://", 1, 4, timeout=5, environ=placed_by_engine(environ))


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (PRRTE, r"PMIx \(PMIX_RANK=3\).*Set WORLD_SIZE"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "many"}, "not what an engine sets: .*'many'"),
        (KUBEFLOW | {"PET_NPROC_PER_NODE": "4"}, "PET_NPROC_PER_NODE=4 asks for 4 processes on each node"),
    ],
)
def test_what_an_engine_cannot_have_meant_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(RendezvousError, match=said):
        placed_by_engine(environ)


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("node[01-03,7],gpu1", ["node01", "node02", "node03", "node7", "gpu1"]),
        ("a[1-2]-b[8-9]x", ["a1-b8x", "a1-b9x", "a2-b8x", "a2-b9x"]),
    ],
)
def test_hosts_in_slurms_notation(nodes: str, hosts: list[str]) -> None:
    assert slurm_hosts(nodes) == hosts

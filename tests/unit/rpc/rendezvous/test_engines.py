"""A worker's place by the variables of the engines that start it."""

from __future__ import annotations

import pytest

from rpc.errors import RendezvousError
from rpc.rendezvous.engines import placed_by_engine, slurm_hosts
from rpc.rendezvous.init_method import open_store, resolve_group

SRUN = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "node[01-03]",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "node[02-03]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "6",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (SRUN, "3 4 1 - node02 29715"),
        (OPEN_MPI, "1 4 1 2 - -"),
        (OPEN_MPI | {"MASTER_ADDR": "head", "MASTER_PORT": "1"}, "1 4 1 2 head 1"),
        (SRUN | OPEN_MPI, "1 4 1 2 - -"),
        (MPICH, "2 4 0 2 - -"),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMIX_RANK": "3"}, "3 4 1 - node02 29715"),
        (KUBEFLOW, "1 2 0 1 train-node-0-0.train 29400"),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "2"}, "0 2 - - a 2"),
        ({"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "6"}, "- - - - - -"),
        ({}, "- - - - - -"),
    ],
)
def test_each_engines_variables_are_read(environ: dict[str, str], place: str) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = placed_by_engine(environ)
    assert " ".join(found.get(name, "-") for name in names) == place


def test_all_tasks_of_a_step_on_one_node_are_known_to_be_there() -> None:
    place = resolve_group(None, None, placed_by_engine(SRUN | {"SLURM_STEP_NODELIST": "node02"}))
    assert place.single_host


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (OPEN_MPI, "started by OpenMPI's mpirun, .*MASTER_ADDR is not set.*mpirun -x MASTER_ADDR=HOST"),
        (MPICH, "started by mpiexec .*-genv MASTER_ADDR HOST"),
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
        ({"PMIX_RANK": "3"}, r"PMIx \(PMIX_RANK=3\).*Set WORLD_SIZE"),
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

"""Variables that engines really set, recorded from runs on hosts node1 to node4 (`make test-engines` compares
them with what the installed engines set). Paths, ports and what tells nothing about a worker's place are left
out.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "HYDRA",
    "KUBEFLOW",
    "OPEN_MPI_4",
    "OPEN_MPI_5",
    "PRRTE",
    "SBATCH",
    "SRUN",
    "SRUN_PMI2",
    "SRUN_SMALLER_STEP",
    "TORCHRUN",
]


def _read(text: str) -> dict[str, str]:
    return dict(item.split("=", 1) for item in text.split())


SRUN: Final = _read("""
    SLURM_CLUSTER_NAME=eng SLURM_CPUS_ON_NODE=1 SLURM_GTIDS=3 SLURM_JOBID=2 SLURM_JOB_CPUS_PER_NODE=3,1
    SLURM_JOB_ID=2 SLURM_JOB_NAME=bash SLURM_JOB_NODELIST=node[1-2] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0
    SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NODELIST=node[1-2] SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_PROCID=3
    SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node[1-2] SLURM_STEP_NUM_NODES=2
    SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=3,1 SLURM_TASKS_PER_NODE=3,1 SLURMD_NODENAME=node2
""")
"""Slurm 22.05.8, ``srun -N2 -n4``, task 3."""

SRUN_PMI2: Final = SRUN | _read("PMI_FD=11 PMI_JOBID=3.0 PMI_RANK=3 PMI_SIZE=4")
"""Slurm 22.05.8, ``srun --mpi=pmi2 -N2 -n4``, task 3."""

SRUN_SMALLER_STEP: Final = _read("""
    SLURM_ARRAY_JOB_ID=4 SLURM_ARRAY_TASK_ID=0 SLURM_JOB_ID=4 SLURM_JOB_NODELIST=node[1-3]
    SLURM_JOB_NUM_NODES=3 SLURM_LOCALID=0 SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NODELIST=node[1-3]
    SLURM_NPROCS=3 SLURM_NTASKS=3 SLURM_NTASKS_PER_NODE=2 SLURM_PROCID=2 SLURM_STEPID=0 SLURM_STEP_ID=0
    SLURM_STEP_NODELIST=node[2-3] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=3
    SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_TASKS_PER_NODE=2,1
""")
"""Slurm 22.05.8, ``srun --exact -N2 -n3 -w node2,node3`` in an array job of three nodes, task 2."""

SBATCH: Final = _read("""
    SLURM_ARRAY_JOB_ID=4 SLURM_ARRAY_TASK_ID=0 SLURM_GTIDS=0 SLURM_JOB_ID=4 SLURM_JOB_NODELIST=node[1-3]
    SLURM_JOB_NUM_NODES=3 SLURM_LOCALID=0 SLURM_NNODES=3 SLURM_NODEID=0 SLURM_NODELIST=node[1-3]
    SLURM_NPROCS=6 SLURM_NTASKS=6 SLURM_NTASKS_PER_NODE=2 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=2(x3)
""")
"""Slurm 22.05.8, the script of that job, outside any step."""

OPEN_MPI_4: Final = _read("""
    OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1
    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_UNIVERSE_SIZE=4 PMIX_HOSTNAME=node2 PMIX_ID=185.3
    PMIX_NAMESPACE=185 PMIX_RANK=3 PMIX_SECURITY_MODE=munge,native PMIX_VERSION=4.2.2rc2
""")
"""OpenMPI 4.1.4, ``mpirun --host node1:2,node2:2 -n 4``, process 3."""

OPEN_MPI_5: Final = _read("""
    OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_NODE_RANK=3
    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_UNIVERSE_SIZE=4 OMPI_VERSION=5.0.11
    PMIX_HOSTNAME=node1 PMIX_NAMESPACE=prterun-node1-19291@1 PMIX_RANK=3 PMIX_VERSION=5.0.11rc1
    PRTE_LAUNCHED=1
""")
"""OpenMPI 5.0.11 (PMIx), ``mpirun --host node1:4 -n 4``, process 3."""

PRRTE: Final = _read("""
    PMIX_HOSTNAME=node1 PMIX_NAMESPACE=prterun-node1-19307@1 PMIX_RANK=3 PMIX_VERSION=5.0.11rc1
    PRTE_LAUNCHED=1
""")
"""OpenMPI 5.0.11's ``prterun --host node1:4 -n 4``, process 3: PMIx without MPI."""

HYDRA: Final = _read("""
    MPIR_CVAR_CH3_INTERFACE_HOSTNAME=node2 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=14 PMI_RANK=3
    PMI_SIZE=4
""")
"""MPICH 4.0.2, ``mpiexec.hydra -hosts node1:2,node2:2 -n 4``, process 3."""

TORCHRUN: Final = _read("""
    GROUP_RANK=0 GROUP_WORLD_SIZE=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=43163
    RANK=1 ROLE_RANK=1 ROLE_WORLD_SIZE=2 TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RESTART_COUNT=0
    TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=2
""")
"""torchrun of PyTorch 2.13.0, ``--nproc-per-node 2 --rdzv-backend c10d``, rank 1."""

KUBEFLOW: Final = _read("""
    PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK=1 PET_MASTER_ADDR=train-node-0-0.train
    PET_MASTER_PORT=29400
""")
"""Kubeflow Trainer 2: from its documentation, not from a run."""

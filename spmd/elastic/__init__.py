"""Elastic jobs: data-parallel training that goes on when members die, leave and join.

``agreement`` decides, without I/O; ``views`` carries it out; ``job`` and ``attempt`` are what programs use.
Names are imported on first use, so that ``agreement`` can be imported without PyTorch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from spmd.elastic.attempt import Attempt
    from spmd.elastic.errors import (
        ElasticError,
        Finished,
        JobMismatchError,
        PutOut,
        StateLostError,
        StepFailedError,
    )
    from spmd.elastic.job import Job, join
    from spmd.elastic.local_sgd import DiLoCo, LocalSGD, Round
    from spmd.elastic.reducer import DistributedDataParallel
    from spmd.elastic.replicas import replica
    from spmd.elastic.replicated.handle import Replicated
    from spmd.elastic.sampling import Sampler

__all__ = [
    "Attempt",
    "DiLoCo",
    "DistributedDataParallel",
    "ElasticError",
    "Finished",
    "Job",
    "JobMismatchError",
    "LocalSGD",
    "PutOut",
    "Replicated",
    "Round",
    "Sampler",
    "StateLostError",
    "StepFailedError",
    "join",
    "replica",
]

_PLACES: Final = {
    "Attempt": "attempt",
    "DiLoCo": "local_sgd",
    "DistributedDataParallel": "reducer",
    "Job": "job",
    "LocalSGD": "local_sgd",
    "Replicated": "replicated.handle",
    "Round": "local_sgd",
    "Sampler": "sampling",
    "join": "job",
    "replica": "replicas",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'spmd.elastic' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"spmd.elastic.{_PLACES.get(name, 'errors')}"), name)

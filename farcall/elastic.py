"""``farcall.elastic``: training that goes on when workers die, leave and join; see ``spmd/elastic``."""

from __future__ import annotations

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

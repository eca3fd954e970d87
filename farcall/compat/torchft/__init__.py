"""torchft's names, for elastic jobs: programs written for torchft run without its lighthouse."""

from __future__ import annotations

from farcall.compat.torchft.data import DistributedSampler
from farcall.compat.torchft.ddp import DistributedDataParallel
from farcall.compat.torchft.manager import Manager
from farcall.compat.torchft.optim import OptimizerWrapper as Optimizer
from farcall.compat.torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

__all__ = [
    "DistributedDataParallel",
    "DistributedSampler",
    "Manager",
    "Optimizer",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
]

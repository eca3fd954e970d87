"""``torch_xla.distributed.fsdp``."""

from __future__ import annotations

from typing import Any

from spmd.fsdp import FSDPv2, SpmdFullyShardedDataParallel, checkpoint_module

__all__ = ["FSDPv2", "SpmdFullyShardedDataParallel", "XlaFullyShardedDataParallel", "checkpoint_module"]


class XlaFullyShardedDataParallel:
    """FSDP over processes, of which SPMD mode has one. Libraries import it beside FSDPv2."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise RuntimeError(
            "XlaFullyShardedDataParallel is for one process a device, and in SPMD mode there is one process: "
            "use torch_xla.experimental.spmd_fully_sharded_data_parallel.SpmdFullyShardedDataParallel (with "
            "transformers' Trainer, xla_fsdp_v2=True in fsdp_config)"
        )

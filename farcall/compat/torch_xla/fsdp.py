"""``torch_xla.distributed.fsdp``."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from farcall.compat.torch_xla.mode import is_spmd
from farcall.compat.torch_xla.model import xla_device
from spmd.fsdp import FSDPv2, SpmdFullyShardedDataParallel, checkpoint_module

__all__ = ["FSDPv2", "SpmdFullyShardedDataParallel", "XlaFullyShardedDataParallel", "checkpoint_module"]

_ABOUT_SHARDS: Final = frozenset(
    (
        *("auto_wrap_policy", "auto_wrapper_callable", "coalesce_all_gather_ops", "disable_reshard_on_root"),
        *(
            "execute_sharding_on_init",
            "flatten_parameters",
            "fp32_reduce_scatter",
            "pin_layout_in_collective_ops",
        ),
        *(
            "optimization_barrier_in_backward",
            "optimization_barrier_in_forward",
            "reduce_scatter_bucket_size_mb",
        ),
        *("reshard_after_forward", "shard_param_on_dim_0", "sync_on_finalization"),
    )
)
"""Options that change how parameters are sharded, gathered and reduced, and no value."""


class XlaFullyShardedDataParallel(nn.Module):
    """FSDP over processes. There is one process, so the module is whole there, and computes as it is.

    Args:
        module: it is moved to the device.
        compute_dtype, buffer_dtype: ``torch.float32``, if any.
        options: others of XLA's.

    Raises:
        RuntimeError: SPMD mode is on, in which tensors are sharded over workers and not over processes.
        ValueError: it is to compute in another dtype.
        TypeError: an option is unknown, or is for groups of several processes.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if is_spmd():
            raise RuntimeError(
                "XlaFullyShardedDataParallel is for one process a device, and in SPMD mode there is one "
                "process: use SpmdFullyShardedDataParallel of "
                "torch_xla.experimental.spmd_fully_sharded_data_parallel (with transformers' Trainer, "
                "xla_fsdp_v2=True in fsdp_config)"
            )
        for dtype in (compute_dtype, buffer_dtype):
            if dtype not in (None, torch.float32):
                raise ValueError(
                    f"XlaFullyShardedDataParallel computes in the dtype of its module, and {dtype} is asked "
                    'for: use torch.autocast("xla", dtype=...) in forward, or convert the module'
                )
        if unknown := options.keys() - _ABOUT_SHARDS:
            raise TypeError(f"XlaFullyShardedDataParallel has one process, and takes no {sorted(unknown)}")
        super().__init__()
        self.module = module.to(xla_device())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""
        return self.module(*args, **kwargs)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, groups: list[list[int]] | None = None
    ) -> Tensor:
        """Clip the gradients by their norm, and return the norm."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the module, as theirs."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

"""``torch_xla.amp``: lower precision on the logical device."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["GradScaler", "autocast"]


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` of the device. ``use_zero_grad`` is taken, and without a meaning here."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        use_zero_grad: bool = False,
    ) -> None:
        super().__init__("spmd", init_scale, growth_factor, backoff_factor, growth_interval, enabled)


class autocast(torch.autocast):  # noqa: N801  theirs
    """``torch.autocast`` for a device; without a dtype, bfloat16."""

    def __init__(
        self,
        device: torch.device | str,
        enabled: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        cache_enabled: bool = True,
    ) -> None:
        kind: Any = torch.device(device).type
        super().__init__("spmd" if kind == "xla" else kind, dtype, enabled, cache_enabled)

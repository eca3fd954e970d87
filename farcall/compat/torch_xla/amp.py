"""``torch_xla.amp``: lower precision on the logical device."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["autocast"]


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

"""``torch.autocast("spmd", dtype=torch.bfloat16)``, with the rules of PyTorch's autocast for other
devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rpc.runtime.torch_internals import pytree
from spmd.torch_internals import DispatchKey, DispatchKeySet, ExcludeDispatchKeyGuard

__all__ = ["install"]

_AUTOCAST: Final[Any] = "AutocastPrivateUse1"
_KEY: Final = DispatchKeySet(getattr(DispatchKey, _AUTOCAST))

_LOWER: Final = (
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "chain_matmul"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
    *("scaled_dot_product_attention", "lstm_cell", "gru_cell", "prelu"),
)
"""Operators that run in the lower precision."""

_FLOAT32: Final = (
    *(
        "softmax.int",
        "log_softmax.int",
        "layer_norm",
        "group_norm",
        "norm.Scalar",
        "exp",
        "log",
        "pow.Tensor_Scalar",
    ),
    *("nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "binary_cross_entropy_with_logits"),
    *("cumsum", "cumprod", "sum", "sum.dim_IntList", "prod", "rsqrt", "softplus", "cosine_similarity"),
)
"""Operators that run in 32 bits."""


def install(library: Any) -> None:
    """Register autocast for the device.

    Args:
        library: library of ``aten``, which holds the registrations.
    """
    every: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    every.fallback(torch.library.fallthrough_kernel, _AUTOCAST)
    library.autocast = every
    for name in _LOWER:
        library.impl(name, _casting(name, None), _AUTOCAST)
    for name in _FLOAT32:
        library.impl(name, _casting(name, torch.float32), _AUTOCAST)


def _casting(name: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        wanted = dtype or torch.get_autocast_dtype("spmd")

        def cast(tensor: Tensor) -> Tensor:
            castable = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
            return tensor.to(wanted) if castable and tensor.device.type == "spmd" else tensor

        with ExcludeDispatchKeyGuard(_KEY):
            args, kwargs = pytree.tree_map_only(Tensor, cast, (args, kwargs))
            return operator(*args, **kwargs)

    return run

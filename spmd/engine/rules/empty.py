"""Workers with an empty shard, if there are fewer rows, or channels, than workers.

PyTorch's kernels are seldom run on nothing: some refuse it, and some divide by its size, which ends the
process. So no kernel runs on a worker that has nothing to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from spmd.engine.program.program import Meta
from spmd.engine.rules.local_rules import Local, Site, local_rule

__all__ = ["zeros_instead"]

_SUMS: Final = ("aten::convolution", "aten::convolution_backward", "aten::native_batch_norm_backward")
"""Operators whose results are sums over the first tensor, and so zeros if its shard is empty."""


def zeros_instead(site: Site, single: bool) -> Callable[..., Any] | None:
    """Return a replacement for a kernel; None unless all its results are empty, or sums over nothing.

    Args:
        single: whether it returns a tensor, and not a sequence.
    """
    made = [None if meta is None else (site.local_shape(meta), meta.dtype) for meta in site.results]
    is_empty = bool(made) and all(each is None or 0 in each[0] for each in made)
    if not is_empty and not (site.call.op.name() in _SUMS and _is_left_out(site, site.call.tensors[0])):
        return None

    def zeros(*args: object, **kwargs: object) -> Any:
        found = [None if each is None else torch.zeros(each[0], dtype=each[1]) for each in made]
        return found[0] if single else found

    return zeros


def _is_left_out(site: Site, meta: Meta) -> bool:
    """Whether a tensor has elements, and none of them is on this worker."""
    return 0 not in meta.shape and 0 in site.local_shape(meta)


@local_rule("convolution_backward")
def _bias_alone(site: Site) -> Local | None:
    """Without channels of the input, the bias still has its gradient, which the kernel leaves out."""
    grad, given = (site.local_shape(meta) for meta in site.call.tensors[:2])
    bias = site.results[2]
    if 0 in grad or 0 not in given or bias is None:
        return None

    def backward(grad: Tensor, given: Tensor, weight: Tensor, *args: Any) -> list[Tensor]:
        return [torch.zeros_like(given), torch.zeros_like(weight), grad.sum([0, *range(2, grad.dim())])]

    return site.runs(backward)

"""What is inferred of operations, where PyTorch's own inference differs from its kernels of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from spmd.engine.program.metas import infer, spec_of

aten: Any = torch.ops.aten


def norms(parameters: torch.dtype | None) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Norms of a tensor in bfloat16."""
    images, rows = torch.randn(2, 4, 3, 3).bfloat16(), torch.randn(2, 5, 4).bfloat16()

    def of_channels() -> Tensor | None:
        return None if parameters is None else torch.ones(4, dtype=parameters)

    weight, bias = of_channels(), of_channels()
    yield aten.native_layer_norm.default, (rows, [4], weight, bias, 1e-5)
    yield aten.native_group_norm.default, (images, weight, bias, 2, 4, 9, 2, 1e-5)
    yield aten._native_batch_norm_legit.no_stats, (images, weight, bias, True, 0.1, 1e-5)
    statistics = parameters or torch.float32
    running = torch.zeros(4, dtype=statistics), torch.ones(4, dtype=statistics)
    for training in (True, False):
        args = (images, weight, bias, *running, training, 0.1, 1e-5)
        yield aten.native_batch_norm.default, args
        yield aten._native_batch_norm_legit_functional.default, args
    yield aten._native_batch_norm_legit_no_training.default, (images, weight, bias, *running, 0.1, 1e-5)


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32, None])
def test_statistics_of_norms_have_the_dtype_that_kernels_return(parameters: torch.dtype | None) -> None:
    for operator, args in norms(parameters):
        told = infer(
            operator, tuple(spec_of(each) if isinstance(each, Tensor) else each for each in args), {}
        )
        made = operator(*args)
        assert [(each.dtype, each.shape) for each in told] == [
            (each.dtype, tuple(each.shape)) for each in made
        ], (operator, args)

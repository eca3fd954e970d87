"""On which threads the nodes of backward passes run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dist_autograd.device_threads import refuse_here


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_hook_on_the_calling_thread_may_begin_a_backward(device: str) -> None:
    called: list[Tensor] = []

    def hook(gradient: Tensor) -> None:
        refuse_here()  # which raises nothing
        called.append(gradient)

    product = torch.ones(3, device=device, requires_grad=True) * 2
    product.register_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch
    product.sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
    assert len(called) == 1

"""On which threads the nodes of backward passes run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dist_autograd.device_threads import device_of_this_thread


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_hooks_on_the_calling_thread_are_on_no_device_s_thread(device: str) -> None:
    found: list[torch.device | None] = []

    def hook(_: Tensor) -> None:
        found.append(device_of_this_thread())

    product = torch.ones(3, device=device, requires_grad=True) * 2
    product.register_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch
    product.sum().backward()  # type: ignore[no-untyped-call]  # untyped in torch
    assert found == [None]

"""What is kept of tensors that were sent: where gradients enter their graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from dist_autograd.graph import Leaf
from dist_autograd.recording import receive, send
from rpc.errors import AutogradError
from rpc.group.peer import Peer

SOMEBODY = cast("Peer", None)


def test_gradients_of_leaves_that_were_sent_need_no_run() -> None:
    first, second = torch.rand(2, requires_grad=True), torch.rand(3, requires_grad=True)
    sent = send([first, second], SOMEBODY)
    leaves = [Leaf(second, None, 1), Leaf(first, None, 1)]
    gradients = [torch.ones(2), torch.ones(3)]
    assert sent.gradients_of_leaves([0, 1], gradients, leaves) == [gradients[1], gradients[0]]


@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(1),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, device="meta"),
        torch.ones(2).to_sparse(),
    ],
    ids=["shape", "type", "device", "layout"],
)
def test_a_gradient_unlike_its_leaf_is_for_the_engine_to_judge(gradient: Tensor) -> None:
    leaf = torch.rand(2, requires_grad=True)
    assert send([leaf], SOMEBODY).gradients_of_leaves([0], [gradient], [Leaf(leaf, None, 1)]) is None


def test_inside_a_transform_nothing_is_sent_or_received() -> None:
    source = cast("Peer", SimpleNamespace(incarnation=1))
    leaf = torch.rand(2, requires_grad=True)
    computed = leaf * 2

    def exchange(row: Tensor) -> Tensor:
        for tensor in (leaf, computed):
            with pytest.raises(AutogradError, match="outside of it"):
                send([tensor], SOMEBODY)
        with pytest.raises(AutogradError, match="outside of it"):
            receive([torch.ones(2)], 1, source, 1)
        return row

    torch.func.vmap(exchange)(torch.ones(2, 2))

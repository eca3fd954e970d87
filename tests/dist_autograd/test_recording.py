"""What is kept of tensors that were sent: where gradients enter their graphs."""

from __future__ import annotations

from typing import cast

import torch

from dist_autograd.recording import SEND_NODE, behind, send
from rpc.peer import Peer

SOMEBODY = cast("Peer", None)


def test_gradients_of_a_computed_tensor_enter_behind_its_send() -> None:
    computed = torch.rand(2, requires_grad=True) * 2
    sent = send([computed], SOMEBODY)
    assert isinstance(sent.start(0)[0], SEND_NODE)
    assert sent.edge(0) == (computed.grad_fn, 0)
    assert sent.end(0).grad_fn is sent.start(0)[0]


def test_gradients_of_a_leaf_enter_at_the_node_that_accumulates_them() -> None:
    leaf = torch.rand(2, requires_grad=True)
    sent = send([leaf], SOMEBODY)
    node, _ = sent.edge(0)
    assert node is sent.start(0)[0]
    assert node.variable is leaf


def test_a_leaf_gets_a_send_when_one_is_needed() -> None:
    leaf = torch.rand(2, requires_grad=True)
    sent = send([leaf], SOMEBODY)
    made = sent.end(0).grad_fn
    assert made is not None
    assert isinstance(made, SEND_NODE)
    assert made.next_functions[0] == sent.edge(0)


def test_a_leaf_that_is_frozen_after_it_was_sent_gets_its_gradient_all_the_same() -> None:
    leaf = torch.rand(2, requires_grad=True)
    sent = send([leaf], SOMEBODY)
    leaf.requires_grad_(False)
    end = sent.end(0)
    assert end.grad_fn is not None
    assert end.grad_fn.next_functions[0] == sent.edge(0)
    assert not leaf.requires_grad


def test_a_leaf_of_another_layout_is_recorded_as_what_is_computed() -> None:
    leaf = torch.eye(2).to_sparse().requires_grad_()
    sent = send([leaf], SOMEBODY)
    assert isinstance(sent.start(0)[0], SEND_NODE)
    assert sent.edge(0)[0].variable is leaf


def test_nothing_lies_behind_leaves() -> None:
    leaf = torch.rand(2, requires_grad=True)
    assert behind(send([leaf, leaf * 2], SOMEBODY), 1) == [[], []]

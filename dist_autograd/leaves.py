"""The gradients of leaves: as they leave the engine, and such as need not enter it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dist_autograd.recording import Sent

__all__ = ["gradients_of_leaves", "owned"]


def owned(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The same gradients, each with memory that none of the others has, and as large as it looks.

    The engine passes one tensor to every input of an addition, and an expanded one out of a sum; such tensors
    may also arrive from other workers. Whoever changes a gradient in place, as clipping does, must change
    that one alone.
    """
    addresses: set[int] = set()
    shared: set[int] = set()
    storages: list[torch.UntypedStorage | None] = []
    for gradient in gradients:
        elements = None if gradient is None else _elements(gradient)
        storage = None if elements is None else elements.untyped_storage()
        storages.append(storage)
        if elements is not None and storage is not None:
            address = storage.data_ptr()
            if address in addresses or storage.nbytes() != elements.nbytes:
                shared.add(address)
            addresses.add(address)
    return [
        gradient.clone()
        if gradient is not None and storage is not None and storage.data_ptr() in shared
        else gradient
        for gradient, storage in zip(gradients, storages, strict=True)
    ]


def _elements(gradient: Tensor) -> Tensor | None:
    """The strided tensor that holds a gradient's elements; None for kinds that share none."""
    if gradient.layout is torch.strided:
        return gradient
    return gradient._values() if gradient.layout is torch.sparse_coo else None


def gradients_of_leaves(
    sent: Sent, indices: Sequence[int], gradients: Sequence[Tensor | None], leaves: Sequence[Any]
) -> list[Tensor | None] | None:
    """The gradients of leaves that were sent themselves, if there is nothing to run for a message at all.

    Args:
        sent: the message.
        indices: which of its tensors take part.
        gradients: of all its tensors, as received.
        leaves: the nodes of the leaves that it reaches.
    """
    if len(leaves) != len(indices):
        return None
    nodes = {id(node) for node in leaves}
    found: dict[int, Tensor] = {}
    for index in indices:
        node, gradient = sent.edge(index)[0], gradients[index]
        if gradient is None or id(node) in found or id(node) not in nodes:
            return None
        if node.variable._backward_hooks or not _is_usual(gradient, node.variable):
            return None
        found[id(node)] = gradient
    return [found[id(node)] for node in leaves]


def _is_usual(gradient: Tensor, leaf: Tensor) -> bool:
    """Whether the engine would pass this gradient on as it is."""
    return (
        type(gradient) is Tensor
        and gradient.layout is torch.strided
        and gradient.shape == leaf.shape
        and gradient.dtype is leaf.dtype
        and gradient.device == leaf.device
    )

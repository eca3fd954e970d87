"""Gradients of leaves: those that the engine computed, and those that need not go through it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from dist_autograd.graph import Leaf
from dist_autograd.recording import Sent
from dist_autograd.torch_internals import uses_of_storage

__all__ = ["gradients_of_leaves", "owned"]


def owned(gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return the same gradients, each with memory of its own and as large as its shape requires.

    The engine passes one tensor to every input of an addition, and an expanded one out of a sum; such tensors
    may also arrive from other workers. A hook may have kept its argument, and a user's function may return a
    tensor that it goes on using. Code that changes a gradient in place, as clipping does, must change only
    that one.

    Args:
        gradients: each referred to by this sequence and by nothing else, as far as the caller knows.
    """
    references_alone, _ = _alone()
    addresses: set[int] = set()
    shared: set[int] = set()
    storages: list[torch.UntypedStorage | None] = []
    for gradient, references in zip(gradients, _references(gradients), strict=True):
        elements = gradient
        if gradient is not None and not (type(gradient) is Tensor and gradient.layout is torch.strided):
            elements = _elements(gradient)
        if gradient is None or elements is None:
            storages.append(None)
            continue
        storage = elements.untyped_storage()
        storages.append(storage)
        address = storage.data_ptr()
        if (
            address in addresses
            or storage.nbytes() != elements.nbytes
            or references > references_alone
            or _is_held_by_others(gradient, elements, storage)
        ):
            shared.add(address)
        addresses.add(address)
    if not shared:
        return gradients
    return [
        gradient.detach().clone()
        if gradient is not None and storage is not None and storage.data_ptr() in shared
        else gradient
        for gradient, storage in zip(gradients, storages, strict=True)
    ]


def _elements(gradient: Tensor) -> Tensor | None:
    """Return the tensor that holds the elements of a gradient that is not strided, or is of a subclass; None
    for kinds that share no elements, or have no memory of their own.
    """
    if gradient.layout is torch.strided:
        return gradient if type(gradient).__torch_dispatch__ is Tensor.__torch_dispatch__ else None
    return gradient._values() if gradient.layout is torch.sparse_coo else None


def _references(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return the number of Python's references to each tensor."""
    return list(map(sys.getrefcount, tensors))


def _is_held_by_others(gradient: Any, elements: Tensor, storage: Any) -> bool:
    """Whether PyTorch refers to a gradient, or anything to its memory, other than through these three."""
    if gradient._use_count() > 1:
        return True
    if elements is not gradient:
        return False  # PyTorch, too, ignores other references to the values of a sparse gradient
    uses = uses_of_storage(storage._cdata)
    if uses <= _USES_ALONE:
        return False
    # The result of a transposition, as for the weight of a `Linear`, refers to the tensor that was
    # transposed.
    return uses > _USES_ALONE + 1 or gradient._base is None or _holders_of_base(gradient) > _alone()[1]


def _holders_of_base(view: Any) -> int:
    """Return the number of references of Python and PyTorch to the base of a view."""
    base = view._base
    return sys.getrefcount(base) + int(base._use_count())


_USES_ALONE: Final = 2
"""Number of uses of a storage that is not shared: the tensor, and the object from ``untyped_storage``."""


@functools.cache
def _alone() -> tuple[int, int]:
    """Return ``_references`` and ``_holders_of_base`` of a tensor without other references."""
    with torch.inference_mode(False):  # the caller may be in that mode
        view = torch.empty(1, device="cpu").view(1)
        return _references([torch.empty(1, device="cpu")])[0], _holders_of_base(view)


def gradients_of_leaves(
    sent: Sent, indices: Sequence[int], gradients: Sequence[Tensor | None], leaves: Sequence[Leaf]
) -> list[Tensor | None] | None:
    """Return the gradients of leaves that were sent themselves, if no node needs to run for the message.

    Args:
        sent: the message.
        indices: indices of its tensors that take part.
        gradients: gradients of all its tensors, as received.
        leaves: the leaves that it reaches.
    """
    if len(leaves) != len(indices):
        return None
    found: dict[int, Tensor] = {}
    for index in indices:
        leaf, gradient = sent.ends[index], gradients[index]
        if sent.nodes[index] is not None or gradient is None or id(leaf) in found:
            return None
        if leaf._backward_hooks or not leaf.requires_grad or not _is_usual(gradient, leaf):
            return None
        found[id(leaf)] = gradient
    return [found[id(leaf.tensor)] for leaf in leaves]


def _is_usual(gradient: Tensor, leaf: Tensor) -> bool:
    """Whether the engine would pass this gradient on unchanged."""
    return (
        type(gradient) is Tensor
        and gradient.layout is torch.strided
        and gradient.shape == leaf.shape
        and gradient.dtype is leaf.dtype
        and gradient.device == leaf.device
    )

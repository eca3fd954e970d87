"""Loops that XLA compiles once: ``scan``, ``scan_layers`` and ``gradient_accumulation``.

Here a loop is recorded step by step, and its program is sent to the workers only once, so they are Python's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rpc.runtime.torch_internals import pytree

__all__ = ["gradient_accumulation", "scan", "scan_layers"]


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    partition_fn: object = None,
    is_fn_pure: bool = False,
) -> tuple[Any, Any]:
    """Apply a function along the first dimension of tensors, and carry something along.

    Args:
        fn: takes what is carried and a slice of ``xs``, and returns what is carried on and a result; all may
            be trees of tensors.
        init: what is carried at first.
        xs: a tensor, or a tree of tensors with the same first dimension.
        partition_fn, is_fn_pure: taken, and without a meaning here.

    Returns:
        What is carried at the end, and the results, stacked.

    Raises:
        ValueError: ``xs`` has no tensors, or tensors of different lengths; or what is carried changes its
            structure.

    Example::

        carry, totals = scan(lambda carry, x: (carry + x, carry + x), torch.zeros(3), torch.ones(4, 3))
    """
    leaves, structure = pytree.tree_flatten(xs)
    lengths = {len(each) for each in leaves if each is not None}
    if len(lengths) != 1:
        raise ValueError(
            f"scan: expected xs of tensors with one first dimension, got lengths {sorted(lengths)}"
        )
    carry, of_carry = _copied(init), pytree.tree_structure(init)
    results: list[list[Any]] = []
    of_results = None
    for step in range(lengths.pop()):
        part = pytree.tree_unflatten([None if each is None else each[step] for each in leaves], structure)
        carry, result = fn(carry, _copied(part))
        if pytree.tree_structure(carry) != of_carry:
            raise ValueError(
                f"scan: fn must return what it was given to carry, {of_carry}; it returned "
                f"{pytree.tree_structure(carry)}"
            )
        made, of_results = pytree.tree_flatten(_copied(result))
        results.append(made)
    if of_results is None:
        raise ValueError("scan: expected xs with at least one slice, got none")
    stacked = [None if each[0] is None else torch.stack(each) for each in zip(*results, strict=True)]
    return carry, pytree.tree_unflatten(stacked, of_results)


def _copied(tree: Any) -> Any:
    """A tree of copies: a function that changes a tensor in place changes neither arguments nor results."""
    return pytree.tree_map_only(Tensor, torch.clone, tree)


def scan_layers(
    layers: Iterable[nn.Module], input_data: Any, partition_fn: object = None, is_layer_pure: bool = False
) -> Any:
    """Run layers one after another, as ``torch.nn.Sequential`` does.

    Args:
        layers: of the same structure.
        input_data: for the first layer.
        partition_fn, is_layer_pure: taken, and without a meaning here.

    Raises:
        ValueError: layers have parameters or buffers of other names or shapes than the first.
    """
    several = list(layers)
    shapes = [{name: t.shape for name, t in each.state_dict().items()} for each in several]
    for place, each in enumerate(shapes):
        if each != shapes[0]:
            raise ValueError(
                f"scan_layers: layer {place} has other parameters than layer 0, {each} for {shapes[0]}: all "
                "must have the same structure"
            )
    for layer in several:
        input_data = layer(input_data)
    return input_data


def gradient_accumulation(
    train_step: Callable[..., Any],
    iterable_tensors: tuple[Tensor, ...],
    model: nn.Module,
    *carried_tensors: Tensor,
) -> Any:
    """Accumulate the model's gradients over slices of a batch. Each slice's loss is divided by their number.

    Args:
        train_step: takes a slice of each of ``iterable_tensors``, then what is carried; returns a loss, or a
            loss and what is carried on.
        iterable_tensors: with the same first dimension, over which is iterated.
        model: its parameters' ``grad`` gets the mean of the slices' gradients added to it.
        carried_tensors: at first.

    Returns:
        The mean of the losses; with carried tensors, a tuple of it and what they are at the end.

    Raises:
        ValueError: there are no tensors, or they are empty, or of different lengths.
    """
    if not iterable_tensors:
        raise ValueError("iterable_tensors cannot be empty")
    for place, each in enumerate(iterable_tensors):
        if not isinstance(each, Tensor):
            raise ValueError(f"Element {place} of iterable_tensors is not a tensor")
        if each.numel() == 0:
            raise ValueError(f"Element {place} of iterable_tensors is empty")
        if len(each) != len(iterable_tensors[0]):
            raise ValueError(f"Element {place} of iterable_tensors has inconsistent first dimension")
    total: Any = None
    carried: tuple[Any, ...] = carried_tensors
    for parts in zip(*iterable_tensors, strict=True):
        made = train_step(*parts, *carried)
        loss, *rest = made if isinstance(made, (tuple, list)) else (made,)
        loss = loss / len(iterable_tensors[0])
        loss.backward()
        carried = tuple(rest)
        total = loss.detach() if total is None else total + loss.detach()
    return (total, *carried) if carried else total

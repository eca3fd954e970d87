"""Several calls done as one: tensors are joined along the first dimension, and results are cut again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rpc.runtime.torch_internals import pytree

__all__ = ["JoinableCall", "join", "split"]


@dataclass(frozen=True, slots=True)
class JoinableCall:
    """The arguments of a call that can be done together with others of its kind.

    Attributes:
        tensors: all that the arguments consist of.
        structure: of the arguments.
        rows: the size of the tensors' first dimension.
    """

    tensors: list[Tensor]
    structure: pytree.TreeSpec
    rows: int

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> JoinableCall | None:
        """A call; None if its arguments are not tensors alone, all with the same number of rows."""
        leaves, structure = pytree.tree_flatten((list(args), dict(kwargs)))
        rows = _rows(leaves)
        return None if rows is None else cls(leaves, structure, rows)

    @property
    def kind(self) -> Hashable:
        """Equal for calls that can be joined: structure, dtypes, and sizes beside the first."""
        return self.structure, tuple((tensor.dtype, tensor.shape[1:]) for tensor in self.tensors)


def join(calls: Sequence[JoinableCall]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of one call in place of several of a kind."""
    joined = [torch.cat(parts) for parts in zip(*(call.tensors for call in calls), strict=True)]
    args, kwargs = pytree.tree_unflatten(joined, calls[0].structure)
    return args, kwargs


def split(result: Any, rows: list[int]) -> list[Any]:
    """The results of the single calls, whose numbers of rows are given, from that of the joined one.

    Raises:
        TypeError: it does not consist of tensors with as many rows.
    """
    leaves, structure = pytree.tree_flatten(result)
    if _rows(leaves) != sum(rows):
        raise TypeError(
            f"a batched function must return tensors with as many rows as it is given, {sum(rows)} here"
        )
    parts = [leaf.split(rows) for leaf in leaves]
    return [pytree.tree_unflatten(list(part), structure) for part in zip(*parts, strict=True)]


def _rows(leaves: list[Any]) -> int | None:
    """How many rows all tensors have; None if they do not agree, or if not all are tensors."""
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return None
    found = {leaf.shape[0] for leaf in leaves}
    return found.pop() if len(found) == 1 else None

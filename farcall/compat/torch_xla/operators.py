"""``torch.ops.xla``: marks as operators, which XLA's programs call where ``torch.compile`` is to see them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from spmd.sharding.marks import mark_sharding, mark_sharding_with_gradients
from spmd.sharding.mesh import Mesh

__all__ = ["define", "take_away"]

_libraries: Final[list[Any]] = []


def define() -> None:
    """Register them with PyTorch, until :func:`take_away`. Idempotent."""
    if _libraries:
        return
    library: Any = torch.library.Library("xla", "FRAGMENT")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    for name, arguments, function in (
        (
            "dynamo_mark_sharding",
            "Tensor t, int[] device_ids, int[] mesh_shape, str axis_names, str partition_spec",
            _dynamo_mark_sharding,
        ),
        ("aot_mark_sharding", "Tensor t, str mesh, str partition_spec", _aot_mark_sharding),
    ):
        library.define(f"{name}({arguments}) -> Tensor")
        library.impl(name, function, "CompositeImplicitAutograd")


def take_away() -> None:
    """Undo :func:`define`."""
    while _libraries:
        _libraries.pop()._destroy()


def _dynamo_mark_sharding(
    t: Tensor, device_ids: Sequence[int], mesh_shape: Sequence[int], axis_names: str, partition_spec: str
) -> Tensor:
    """Mark ``t`` in place; names and spec are written as in Python: ``"('x', 'y')"``, ``"(0, None)"``."""
    mesh = Mesh(list(device_ids), tuple(mesh_shape), ast.literal_eval(axis_names))
    return mark_sharding(t, mesh, ast.literal_eval(partition_spec))


def _aot_mark_sharding(t: Tensor, mesh: str, partition_spec: str) -> Tensor:
    """A copy that is marked, and its gradient as well; the mesh is ``str(mesh)``."""
    found = Mesh.from_str(mesh)
    if found is None:
        raise ValueError(f"expected a mesh as str(mesh) writes it, got {mesh!r}")
    return mark_sharding_with_gradients(t, found, ast.literal_eval(partition_spec))

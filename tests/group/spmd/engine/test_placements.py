"""From every pair of placements on a mesh of two dimensions to every other, forward and backward.

A tensor is redistributed as a ``DTensor``, and as plain parts by the styles that lay out a module's input and
output anew, along each dimension of the mesh. It must stay the same tensor, and its gradient with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from spmd.tensor_parallel import PrepareModuleInput, PrepareModuleOutput, parallelize_module
from tests.group.spmd.meshes import backward, gradient_of, in_mesh

PLACEMENTS: Final = (Replicate(), Shard(0), Shard(1), Partial())
PAIRS: Final = list(itertools.product(PLACEMENTS, repeat=2))
SHAPES: Final = ((7, 5), (1, 2), (12, 6), (3, 4, 2), (0, 6))
"""Uneven, with parts that are empty; smaller than the mesh; even; and others."""


def numbers(shape: Sequence[int], times: int = 1) -> Tensor:
    """Whole ones, so that shares of them add up exactly."""
    return (torch.arange(float(torch.Size(shape).numel())).double() * times + 3).view(*shape)


def part_of(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's part; one of a sum is a share of its own."""
    for dim, placement in enumerate(placements):
        size, rank = mesh.size(dim), mesh.get_local_rank(dim)
        if isinstance(placement, Shard):
            chunks = whole.chunk(size, placement.dim)
            whole = chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)
        elif isinstance(placement, Partial):
            whole = whole * (rank + 1 if rank + 1 < size else 1 - size * (size - 1) // 2)
    return whole.clone(memory_format=torch.contiguous_format)


def distributed(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    part = part_of(whole, mesh, placements)
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def back(placements: Sequence[Placement]) -> list[Placement]:
    """Of a gradient: that of a sum's shares is replicated."""
    return [Replicate() if isinstance(each, Partial) else each for each in placements]


def assert_is(found: Tensor | None, whole: Tensor, what: str) -> None:
    assert isinstance(found, DTensor), what
    if any(isinstance(each, Partial) for each in found.placements):
        assert torch.equal(found.full_tensor(), whole), what
    else:
        assert torch.equal(found.to_local(), part_of(whole, found.device_mesh, found.placements)), what


def redistribute(mesh: DeviceMesh, shape: Sequence[int]) -> None:
    x, gradient = numbers(shape), numbers(shape, 2)
    for source, target in itertools.product(PAIRS, PAIRS):
        if any(isinstance(to, Partial) and to != each for each, to in zip(source, target, strict=True)):
            continue  # PyTorch makes no sum of what is none
        what = f"{source} to {target} of {shape}"
        leaf = distributed(x, mesh, source)
        leaf.requires_grad_()
        moved = leaf.redistribute(placements=target)
        assert list(moved.placements) == list(target), what
        assert_is(moved, x, what)
        backward(moved, distributed(gradient, mesh, back(target)))
        assert_is(leaf.grad, gradient, what)


@in_mesh(4, 2, 2)
def test_redistribution(mesh: DeviceMesh) -> None:
    redistribute(mesh, SHAPES[0])


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@in_mesh(6, 2, 3)
def test_redistribution_where_dimensions_differ(mesh: DeviceMesh, shape: Sequence[int]) -> None:
    redistribute(mesh, shape)


@in_mesh(4, 2, 2, names=("dp", "tp"))
def test_styles_lay_out_anew_along_each_dimension(mesh: DeviceMesh) -> None:
    x, gradient = numbers((6, 12)), numbers((6, 12), 2)
    for name, (source, target) in itertools.product(("dp", "tp"), PAIRS):
        if isinstance(target, Partial):
            continue  # the styles know no way there
        line = mesh[name]
        styles = [
            PrepareModuleInput(input_layouts=source, desired_input_layouts=target, use_local_output=True),
            PrepareModuleOutput(output_layouts=source, desired_output_layouts=target),
        ]
        for style in styles:
            module = parallelize_module(nn.Identity(), line, style)
            what = f"{style} along {name}"
            leaf = part_of(x, line, [source]).requires_grad_()
            moved = module(leaf)
            assert torch.equal(moved, part_of(x, line, [target])), what
            backward(moved, part_of(gradient, line, [target]))
            assert torch.equal(gradient_of(leaf), part_of(gradient, line, back([source]))), what

"""From every placement to every other, forward and backward.

Plain parts are redistributed by the styles that lay out a module's input and output anew, along each
dimension of the mesh. They must stay parts of the same tensor, and their gradients with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from spmd.tensor_parallel import PrepareModuleInput, PrepareModuleOutput, parallelize_module
from tests.group.spmd.meshes import backward, gradient_of, in_mesh

PLACEMENTS: Final = (Replicate(), Shard(0), Shard(1), Partial())
PAIRS: Final = list(itertools.product(PLACEMENTS, repeat=2))


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


def back(placements: Sequence[Placement]) -> list[Placement]:
    """Of a gradient: that of a sum's shares is replicated."""
    return [Replicate() if isinstance(each, Partial) else each for each in placements]


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

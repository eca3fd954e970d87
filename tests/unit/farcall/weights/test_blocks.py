"""Which blocks a process has, beside DTensor's own sharding."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from farcall.weights import Block, WeightsError
from farcall.weights.blocks import Box, cut, indices_of, pieces_of
from spmd.torch_internals import StridedShard


def sharded(whole: torch.Tensor, mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: Any) -> Any:
    """The local tensor, as the placements themselves split a tensor."""
    for ranks, rank, placement in zip(mesh, coordinate, placements, strict=True):
        if not isinstance(placement, Replicate):
            shards, _ = placement._split_tensor(whole, ranks, with_padding=False, contiguous=True)
            whole = shards[rank]
    return whole


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    one = st.one_of(
        st.just(Replicate()),
        dims.map(Shard),
        st.builds(lambda dim, factor: StridedShard(dim, split_factor=factor), dims, st.integers(1, 3)),
    )
    return shape, mesh, [draw(one) for _ in mesh]


@given(placed())
def test_each_rank_has_what_dtensor_gives_it(
    case: tuple[tuple[int, ...], tuple[int, ...], list[Any]],
) -> None:
    shape, mesh, placements = case
    whole = torch.arange(int(np.prod(shape))).view(shape)
    for coordinate in itertools.product(*map(range, mesh)):
        indices = indices_of(shape, mesh, coordinate, placements)
        expected = sharded(whole, mesh, coordinate, placements)
        assert torch.equal(whole[np.ix_(*indices)], expected)


def test_a_block_is_inside_its_tensor() -> None:
    for offset, shape in (((3,), (4,)), ((-1,), (4,)), ((0, 0), (4, 4)), ((0,), (4, 4))):
        with pytest.raises(WeightsError, match="is not inside a tensor"):
            Block(torch.zeros(2), offset, shape)
    with pytest.raises(TypeError, match="plain tensor"):
        Block([1.0], (0,), (2,))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_values_that_are_no_dense_tensors_are_refused_by_name() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    two_bits = torch.zeros(4, dtype=torch.uint8).view(torch.uint2)  # type: ignore[attr-defined]  # mypy does not know it
    for value in (3, None, torch.zeros(2, device="meta"), torch.zeros(2, 2).to_sparse(), ragged, two_bits):
        with pytest.raises(WeightsError, match="'step'"):
            pieces_of("step", value)


def test_empty_blocks_are_no_pieces() -> None:
    pieces, shape = pieces_of("w", Block(torch.zeros(0, 4), (2, 0), (2, 4)))
    assert (pieces, shape) == ([], (2, 4))


@given(st.lists(st.integers(1, 9), max_size=3), st.integers(1, 50))
def test_a_box_is_cut_into_small_ones_that_make_it_up(sizes: list[int], largest: int) -> None:
    box = Box((1,) * len(sizes), tuple(sizes))
    count = torch.zeros([size + 2 for size in sizes], dtype=torch.int32)
    for each in cut(box, largest):
        assert each.volume <= largest
        each.of(count).add_(1)
    assert bool((box.of(count) == 1).all())
    assert int(count.sum()) == box.volume

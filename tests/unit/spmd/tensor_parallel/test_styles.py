"""What styles check when they are made, how they show, and how shards are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import parallel as pytorch

import spmd
from spmd import tensor_parallel
from spmd.tensor_parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from spmd.tensor_parallel.resharding import chunk, global_shape, local_shape
from tests.support.effort import PROFILE

MADE_ALIKE: dict[str, list[dict[str, Any]]] = {
    "ColwiseParallel": [{}, {"input_layouts": Shard(1), "use_local_output": False}],
    "RowwiseParallel": [{}, {"output_layouts": Shard(0)}],
    "SequenceParallel": [{}, {"sequence_dim": 0, "use_local_output": True}],
    "PrepareModuleInput": [
        {},
        {"input_layouts": (Shard(0), None), "desired_input_layouts": (Replicate(), None)},
        {"input_kwarg_layouts": {"x": Shard(0)}, "desired_input_kwarg_layouts": {"x": Replicate()}},
    ],
    "PrepareModuleOutput": [{"output_layouts": Replicate(), "desired_output_layouts": Shard(0)}],
    "PrepareModuleInputOutput": [{"output_layouts": Replicate(), "desired_output_layouts": Shard(0)}],
}


@pytest.mark.parametrize(("name", "arguments"), [(n, a) for n, each in MADE_ALIKE.items() for a in each])
def test_styles_show_as_pytorchs(name: str, arguments: dict[str, Any]) -> None:
    assert repr(getattr(tensor_parallel, name)(**arguments)) == repr(getattr(pytorch, name)(**arguments))


def test_the_names_are_pytorchs_and_two_more() -> None:
    assert set(tensor_parallel.__all__) == {*pytorch.__all__, "ShardedModule", "explain"}
    assert spmd.explain is tensor_parallel.explain


WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (
        ColwiseParallel,
        {"input_layouts": (Shard(0),)},
        TypeError,
        "input_layouts to be a Placement, got tuple",
    ),
    (
        RowwiseParallel,
        {"output_layouts": "replicate"},
        TypeError,
        "output_layouts to be a Placement, got str",
    ),
    (
        ColwiseParallel,
        {"output_layouts": Partial("max")},
        ValueError,
        r"Partial\('sum'\), got Partial\(max\)",
    ),
    (SequenceParallel, {"sequence_dim": "1"}, TypeError, "sequence_dim to be an int, got str"),
    (PrepareModuleInput, {"input_layouts": Shard(0)}, AssertionError, "should not be None"),
    (PrepareModuleInput, {"input_layouts": [1], "desired_input_layouts": [1]}, TypeError, "input_layouts"),
    (
        PrepareModuleInput,
        {"input_layouts": (Shard(0), None), "desired_input_layouts": Shard(0)},
        AssertionError,
        "should have same length! Got 2 and 1",
    ),
    (
        PrepareModuleInput,
        {"input_kwarg_layouts": {"a": Shard(0)}, "desired_input_kwarg_layouts": {}},
        AssertionError,
        "should have same length",
    ),
    (
        PrepareModuleInput,
        {"input_kwarg_layouts": {"a": Shard(0)}, "desired_input_kwarg_layouts": {"b": Shard(0)}},
        AssertionError,
        r"the same names.*\['a', 'b'\]",
    ),
    (
        PrepareModuleOutput,
        {"output_layouts": Shard(0), "desired_output_layouts": (Shard(0), Shard(1))},
        AssertionError,
        "should have same length! Got 1 and 2",
    ),
]


@pytest.mark.parametrize(("style", "arguments", "error", "message"), WRONG)
def test_wrong_layouts(style: Any, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        style(**arguments)


@PROFILE
@given(size=st.integers(0, 40), count=st.integers(1, 9))
def test_shards_are_cut_as_torch_chunk_does(size: int, count: int) -> None:
    chunks = [each.tolist() for each in torch.arange(size).chunk(count)] if size else []
    chunks += [[]] * (count - len(chunks))
    for index in range(count):
        length, offset = chunk(size, count, index)
        assert list(range(offset, offset + length)) == chunks[index]


def test_shapes_of_parts_and_of_the_whole() -> None:
    assert global_shape((4, 3), Shard(-1), 2) == (4, 6)
    assert global_shape((4, 3), Replicate(), 2) == (4, 3)
    assert [local_shape((5, 2), Shard(0), 3, rank) for rank in range(3)] == [(2, 2), (2, 2), (1, 2)]

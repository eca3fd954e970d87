"""Versions that several parts make up."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall.weights import WeightsError
from farcall.weights.assembly import Assembly
from farcall.weights.blocks import Box
from farcall.weights.layout import Spec

W = {"w": Spec("float32", (4, 6))}


def rows(begin: int, end: int) -> dict[str, list[Box]]:
    return {"w": [Box((begin, 0), (end - begin, 6))]}


def test_replicas_are_written_once() -> None:
    parts = Assembly(2)
    parts.declare(1, W, rows(0, 4))
    parts.declare(0, W, rows(0, 4))
    assert parts.writes(1) == rows(0, 4)
    assert parts.writes(0) == {"w": []}


def test_blocks_that_overlap_are_refused_and_the_right_ones_taken_then() -> None:
    parts = Assembly(2)
    parts.declare(0, W, rows(0, 2))
    with pytest.raises(
        WeightsError, match=r"blocks of 'w' overlap: \[2, 6\] at \[0, 0\] .* \[3, 6\] at \[1, 0\]"
    ):
        parts.declare(1, W, rows(1, 4))
    with pytest.raises(WeightsError, match="overlap"):
        parts.declare(1, W, {"w": [*rows(2, 4)["w"], *rows(3, 4)["w"]]})
    parts.declare(1, W, rows(2, 4))


def test_blocks_outside_are_refused() -> None:
    for box in (Box((0, 0), (5, 6)), Box((-1, 0), (2, 6)), Box((0,), (4,)), Box((0, 7), (1, -1))):
        with pytest.raises(WeightsError, match="not inside"):
            Assembly(1).declare(0, W, {"w": [box]})


def test_a_part_that_is_given_again_is_the_same() -> None:
    parts = Assembly(2)
    parts.declare(0, W, rows(0, 2))
    assert parts.declare(0, W, rows(0, 2)) is None
    with pytest.raises(WeightsError, match="other blocks of 'w'"):
        parts.declare(0, W, rows(0, 3))
    with pytest.raises(WeightsError, match=r"'w' is float32\[4, 6\] .* float32\[4, 7\]"):
        parts.declare(0, {"w": Spec("float32", (4, 7))}, rows(0, 2))
    with pytest.raises(WeightsError, match="'b' was not in both"):
        parts.declare(0, W | {"b": Spec("bool", ())}, rows(0, 2) | {"b": [Box((), ())]})
    with pytest.raises(WeightsError, match=r"'w' is float32\[4, 6\] .* bfloat16\[4, 6\]"):
        parts.declare(1, {"w": Spec("bfloat16", (4, 6))}, rows(2, 4))


def test_each_stage_of_a_pipeline_brings_its_own_tensors() -> None:
    parts = Assembly(2)
    assert parts.declare(0, W, rows(0, 4)) == 128
    assert parts.declare(1, {"b": Spec("bool", ())}, {"b": [Box((), ())]}) == 64
    assert parts.layout.sizes == [128, 64]


@settings(deadline=None)
@given(st.data())
def test_any_partition_is_accepted_in_any_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = [sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=2))}) for length in shape]
    boxes = [Box((), ())]
    for marks in cuts:
        boxes = [
            Box((*offset, begin), (*sizes, end - begin))
            for offset, sizes in boxes
            for begin, end in itertools.pairwise(marks)
        ]
    boxes = data.draw(st.permutations(boxes))
    spec = {"w": Spec("float32", shape)}
    parts = Assembly(len(boxes))
    for part, box in enumerate(boxes[:-1]):
        parts.declare(part, spec, {"w": [box]})
        if part:  # a larger block overlaps with another part's
            with pytest.raises(WeightsError):
                parts.declare(part + 1, spec, {"w": [Box((0,) * len(shape), shape)]})
    parts.declare(len(boxes) - 1, spec, {"w": [boxes[-1]]})
    assert sum(sum(box.volume for box in parts.writes(part)["w"]) for part in range(len(boxes))) == (
        sum(box.volume for box in boxes)
    )

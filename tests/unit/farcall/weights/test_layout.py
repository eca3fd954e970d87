"""How a version lies in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farcall.weights import WeightsError
from farcall.weights.layout import Layout, Spec, difference

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
SPECS = st.dictionaries(
    st.text("ab", max_size=3),
    st.builds(Spec, st.sampled_from(["bfloat16", "float64", "bool", "complex64", "float8_e4m3fn"]), SHAPES),
    max_size=5,
)


@given(SPECS, SPECS)
def test_tensors_lie_beside_each_other(first: dict[str, Spec], second: dict[str, Spec]) -> None:
    layout = Layout()
    layout.add(first)
    layout.add({name: spec for name, spec in second.items() if name not in first})
    layout = Layout.from_wire(layout.to_wire())
    segments = [torch.zeros(size, dtype=torch.uint8) for size in layout.sizes]
    for name, spec in layout.specs.items():
        tensor = layout.tensor(segments, name)
        assert (tuple(tensor.shape), str(tensor.dtype)) == (spec.shape, f"torch.{spec.dtype}")
        tensor.reshape(-1).view(torch.uint8).add_(1)
    assert all(bool((each <= 1).all()) for each in segments)
    assert sum(int(each.sum()) for each in segments) == sum(spec.bytes for spec in layout.specs.values())


@pytest.mark.parametrize(
    "wire",
    [
        None,
        [[64]],
        [[-1], []],
        [[64], [["w", "float32", [17], 0, 0]]],
        [[64], [["w", "float32", [1 << 40, 1 << 40], 0, 0]]],
        [[64], [["w", "float32", [1], 1, 0]]],
        [[64], [["w", "float32", [1], -1, 0]]],
        [[64], [["w", "float32", [1], 0, -64]]],
        [[64], [["w", "float32", [1], 0, 2]]],
        [[64], [["w", "float33", [1], 0, 0]]],
        [[64], [["w", "float32", [-1], 0, 0]]],
        [[64], [["w", "float32", "1", 0, 0]]],
        [[64], [["w", "float32", [1], 0, 0], ["w", "float32", [1], 0, 0]]],
        [[64], [[7, "float32", [1], 0, 0]]],
    ],
)
def test_a_malformed_layout_is_refused(wire: Any) -> None:
    with pytest.raises(WeightsError):
        Layout.from_wire(wire)


def test_the_first_difference_is_named() -> None:
    there = {"w": Spec("float32", (3,)), "b": Spec("bool", ())}
    assert difference({}, there) == "the caller has no tensor 'w' and 1 more"

"""Differences between versions of a tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farcall.weights import WeightsError, delta

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.int8, torch.complex128]


def encoded(old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = delta.encode(old, new, 1 << 40)
    assert found is not None
    assert delta.encode(old, new, len(found[0]) + len(found[1])) is not None
    assert not len(found[0]) or delta.encode(old, new, len(found[0]) + len(found[1]) - 1) is None
    return found


@given(
    st.sampled_from(DTYPES),
    st.integers(1, 3000),
    st.lists(st.integers(0, 2999), max_size=20),
    st.integers(0, 1 << 30),
)
def test_the_new_version_comes_out_bit_for_bit(
    dtype: torch.dtype, size: int, changed: list[int], seed: int
) -> None:
    random = np.random.default_rng(seed)
    old = torch.from_numpy(random.integers(0, 256, size * dtype.itemsize, np.uint8))
    if dtype is torch.bool:
        old %= 2
    new = old.clone()
    for each in changed:
        if each < size:
            new[each * dtype.itemsize] ^= 1
    gaps, bits = encoded(old.view(dtype), new.view(dtype))
    for _ in range(2):  # applied twice, it does no harm
        delta.apply(gaps, bits, old.view(dtype))
        assert torch.equal(old, new)
    elements = size * max(1, dtype.itemsize // 8)  # complex128 goes as two for each
    assert len(gaps) <= len(set(changed)) + elements // 255 + 1


def test_changes_may_be_far_apart() -> None:
    old = torch.zeros((1 << 21) + 3, dtype=torch.int8)
    new = old.clone()
    new[[0, 5, (1 << 20) - 1, 1 << 20, (1 << 21) + 2]] = 1
    gaps, bits = encoded(old, new)
    delta.apply(gaps, bits, old)
    assert torch.equal(old, new)


def test_malformed_differences_change_nothing() -> None:
    into = torch.zeros(4, dtype=torch.int16)
    for gaps, bits in (([4], [1, 1]), ([0], [1]), ([0, 0], [1, 1]), ([255, 0], [1, 1])):
        with pytest.raises(WeightsError, match="malformed"):
            delta.apply(torch.tensor(gaps, dtype=torch.uint8), torch.tensor(bits, dtype=torch.uint8), into)
    assert not into.any()

"""Copies are whole, short and long ones, however the bytes are cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rpc.bulk.copying import copy, scatter


@pytest.mark.parametrize("size", [0, 1, 5000, 256 << 10, (1 << 20) + 1, 17 << 20])
def test_a_copy_is_whole(size: int) -> None:
    source = np.random.default_rng(0).bytes(size)
    target = bytearray(size)
    copy(source, memoryview(target))
    assert target == source


CUTS = [(), (0,), (7,), (7, 7), (1, 5, 9), (400_000,), (3, 600_000, 600_001)]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_bytes_cut_one_way_fill_buffers_cut_another(cuts: tuple[int, ...]) -> None:
    size = 700_000
    source = memoryview(np.random.default_rng(0).bytes(size))
    for others in CUTS:
        target = memoryview(bytearray(size))
        scatter(pieces(source, cuts), pieces(target, others))
        assert target == source, others


def pieces(whole: memoryview, cuts: tuple[int, ...]) -> list[memoryview]:
    return [whole[begin:end] for begin, end in itertools.pairwise((0, *cuts, len(whole)))]

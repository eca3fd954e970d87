"""Copies are whole, short and long ones."""

from __future__ import annotations

import numpy as np
import pytest

from rpc.bulk.copying import copy


@pytest.mark.parametrize("size", [0, 5000, (1 << 20) + 1, (17 << 20) + 1])
def test_a_copy_is_whole(size: int) -> None:
    source = np.random.default_rng(0).bytes(size)
    target = bytearray(size)
    copy(source, memoryview(target))
    assert target == source

from __future__ import annotations

import numpy as np
import pytest

from rpc.bulk.shared_memory.copying import Copier

MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, 5000, 256 << 10, MIB + 1, 33 * MIB + 7])
def test_copies_are_whole(size: int) -> None:
    source, target = memoryview(np.random.default_rng(0).bytes(size)), memoryview(bytearray(size))
    Copier().copy(source, target)
    assert target == source

"""A received NumPy array is its receiver's own: writable, whatever the sender may do with the original."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rpc.serialization.neutral_codec import NeutralCodec
from rpc.serialization.pickler import Reducers
from tests.unit.rpc.serialization.journey import CALLEE, CALLER, deliver, send, send_call

ARRAYS = {
    "contiguous": np.arange(6.0),
    "of Fortran's order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "transposed": np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2),
    "without dimensions": np.array(3.0),
    "over bytes": np.frombuffer(bytes(48)),
    "broadcast": np.broadcast_to(np.ones(1), (5,)),
    "large": np.arange(20_000.0),
    "with fields": np.zeros(3, [("a", "i4"), ("b", "f8")]),
    "of dates": np.array(["2020-01-01"], "M8[D]"),
    "of objects": np.array([1, "a"], object),
    "big-endian": np.arange(3, dtype=">i4"),
    "of records": np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
}


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def check(arrived: Any, original: np.ndarray[Any, Any]) -> None:
    assert (type(arrived), arrived.dtype) == (type(original), original.dtype)
    np.testing.assert_array_equal(arrived, original)
    arrived[...] = arrived.copy()


@pytest.mark.parametrize("name", ARRAYS)
def test_a_read_only_array_arrives_writable(name: str) -> None:
    array = read_only(ARRAYS[name])
    check(send(array), array)
    _, (first, second), words = send_call(max, ([array], {"inner": (array,)}), {"word": array})
    assert first[0] is second["inner"][0] is words["word"]
    check(first[0], array)


@pytest.mark.parametrize("name", ["contiguous", "over bytes", "large", "of dates"])
@pytest.mark.parametrize("make", [np.copy, read_only])
def test_without_pickle_too(name: str, make: Any) -> None:
    array, codec = make(ARRAYS[name]), NeutralCodec(Reducers(), None)
    header, buffers = deliver(codec.dumps([array, array], CALLEE))
    one, other = codec.loads(header, buffers, None, CALLER)
    assert one is other
    check(one, array)


def test_the_senders_array_stays_read_only_and_unchanged() -> None:
    array = read_only(np.arange(20_000.0))
    send(array)[:] = 7
    assert not array.flags.writeable
    np.testing.assert_array_equal(array, np.arange(20_000.0))

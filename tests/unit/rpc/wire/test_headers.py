"""Headers are bounded before anything is made of them."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import ProtocolError
from rpc.wire.frames import encode
from rpc.wire.headers import MAX_ENTRIES, check_entries, unpack_header
from tests.support.effort import PROFILE

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=40))
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
    max_leaves=30,
)


@PROFILE
@given(st.dictionaries(st.text(), values, max_size=5))
def test_what_msgpack_makes_ends_where_it_ends(header: dict[str, Any]) -> None:
    packed = msgpack.packb(header)
    check_entries(memoryview(packed))
    with pytest.raises(ProtocolError, match="ends too soon"):
        check_entries(memoryview(packed)[:-1])


def list_of(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4)


def with_value(packed: bytes) -> bytes:
    """A header of one key."""
    return b"\x81\xa1k" + packed


HEADERS = {
    "a map of many entries": b"\xdf" + (4 << 20).to_bytes(4) + b"\xa0\xc0" * (4 << 20),
    "a list of many empty lists": with_value(list_of(2 << 20) + b"\x90" * (2 << 20)),
    "many lists in a list": with_value(list_of(1 << 16) + (b"\x9f" + b"\xc0" * 15) * (1 << 16)),
    "a list that is announced": with_value(list_of(1 << 31)),
    "large lists that are announced, in each other": with_value(list_of(60_000) * 1000) + bytes(50_000),
    "small lists in each other, and a large one": with_value(b"\x91" * 200 + list_of(2000) + b"\xc0" * 2000),
    "nothing but lists": b"\x91" * 60_000,
}


@pytest.mark.parametrize("packed", HEADERS.values(), ids=HEADERS)
def test_a_header_of_too_much_is_refused_and_takes_no_memory(packed: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=r"header (has more than|is nested more than|is not msgpack)"):
            unpack_header(memoryview(packed))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(packed) + (16 << 20)


def test_who_would_send_too_many_entries_is_told() -> None:
    with pytest.raises(ProtocolError, match=f"more than {MAX_ENTRIES} entries"):
        encode(5, 1, {"k": [[]] * (1 << 20)}, ())


def test_a_header_may_have_long_lists() -> None:
    for header in (
        {"k": list(range(5000))},
        {"k": [[1, [2, 3]]] * 20_000},
        {"k": dict.fromkeys(range(3000))},
    ):
        assert unpack_header(memoryview(msgpack.packb(header))) == header

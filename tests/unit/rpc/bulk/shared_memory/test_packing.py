"""Messages in segments as they are written, and what is read of anything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.bulk.shared_memory.packing import ALIGNMENT, Message, pack, places, unpack
from rpc.errors import ProtocolError
from rpc.wire.frames import Kind
from rpc.wire.reassembly import MAX_BUFFERS
from tests.support.effort import PROFILE

WORDS = st.integers(0, (1 << 64) - 1)
HEADERS = st.dictionaries(st.text(max_size=5), st.integers(-5, 5) | st.binary(max_size=5), max_size=3)
MESSAGES = st.builds(
    Message, st.integers(0, 255), HEADERS, WORDS, WORDS, st.lists(WORDS, max_size=5).map(tuple), st.binary()
)


@PROFILE
@given(MESSAGES)
def test_what_is_packed_is_unpacked(message: Message) -> None:
    unpacked = unpack(bytearray(pack(message)))
    assert unpacked._replace(pickle=bytes(unpacked.pickle)) == message


def test_too_many_buffers_are_an_error() -> None:
    packed = bytearray(pack(Message(Kind.CALL, {}, 1, 2, (), b"")))
    packed[4:8] = (MAX_BUFFERS + 1).to_bytes(4, "little")
    with pytest.raises(ProtocolError, match="over the limit"):
        unpack(packed)


@PROFILE
@given(st.lists(st.integers(0, 1 << 40)))
def test_buffers_are_aligned_and_do_not_overlap(lengths: list[int]) -> None:
    offsets, size = places(lengths)
    end = 0
    for offset, length in zip(offsets, lengths, strict=True):
        assert offset % ALIGNMENT == 0
        assert end <= offset < end + ALIGNMENT
        end = offset + length
    assert size == end

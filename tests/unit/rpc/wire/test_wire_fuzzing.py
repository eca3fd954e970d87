"""The codec under random and damaged bytes: nothing but ``ProtocolError``, no allocation beyond the limit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import ProtocolError
from rpc.wire import frames, reassembly
from rpc.wire.decoder import Decoder
from tests.support.effort import PROFILE
from tests.support.frames import (
    Message,
    chunkings,
    endless,
    feed,
    packed,
    prefix,
    segment_lists,
    small_messages,
    stream_of,
    u64,
)

FUZZ_LIMIT = 300_000


@pytest.fixture(scope="module")
def allocations() -> Iterator[list[int]]:
    """The sizes of what the decoder allocates for bodies that don't fit its buffer."""
    sizes: list[int] = []
    allocate = reassembly.allocate

    def noting(length: int) -> memoryview:
        sizes.append(length)
        return allocate(length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rpc.wire.decoder.allocate", noting)
        yield sizes


def survives(data: bytes, sizes: list[int], allocations: list[int]) -> None:
    allocations.clear()
    decoder = Decoder(FUZZ_LIMIT)
    try:
        for frame in feed(decoder, data, endless(sizes)):
            assert isinstance(frame.header, dict)
            assert sum(map(len, frame.buffers)) <= FUZZ_LIMIT
    except ProtocolError:
        pass
    assert all(size <= FUZZ_LIMIT for size in allocations)


@PROFILE
@given(data=st.binary(max_size=400), sizes=chunkings)
def test_random_bytes_do_no_harm(allocations: list[int], data: bytes, sizes: list[int]) -> None:
    survives(data, sizes, allocations)
    survives(frames.PREAMBLE + data, sizes, allocations)


near_limits = st.sampled_from([0, 1, 7, 8, 9, 16, 27, 28, 29, FUZZ_LIMIT - 1, FUZZ_LIMIT, FUZZ_LIMIT + 1])
lengths = near_limits | st.integers(0, 2**32 - 1)


@PROFILE
@given(
    body=lengths | u64,
    header=lengths,
    segments=lengths,
    rest=st.binary(max_size=200) | segment_lists.map(packed),
    sizes=chunkings,
)
def test_random_prefixes_do_no_harm(
    allocations: list[int], body: int, header: int, segments: int, rest: bytes, sizes: list[int]
) -> None:
    data = frames.PREAMBLE + prefix(body, header=header, segments=segments) + rest
    survives(data, sizes, allocations)
    # A body as long as announced gets past the first checks.
    exact = (
        frames.PREAMBLE + prefix(len(rest), header=header % (len(rest) + 1), segments=segments % 30) + rest
    )
    survives(exact + exact[len(frames.PREAMBLE) :], sizes, allocations)


@PROFILE
@given(
    messages=st.lists(small_messages, min_size=1, max_size=3),
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 2**16),
    sizes=chunkings,
)
def test_valid_streams_with_a_few_bytes_changed_do_no_harm(
    allocations: list[int],
    messages: list[Message],
    changes: list[tuple[int, int]],
    cut: int,
    sizes: list[int],
) -> None:
    data = bytearray(stream_of(messages))
    for position, value in changes:
        data[position % len(data)] = value
    survives(bytes(data), sizes, allocations)
    survives(bytes(data[: cut % len(data)]), sizes, allocations)

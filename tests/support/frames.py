"""Frames to send through the codec: how to encode them, feed them in pieces, and make up random ones."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any

import msgpack
from hypothesis import strategies as st

from rpc.wire import frames
from rpc.wire.decoder import Decoder
from rpc.wire.frames import Frame, Kind, encode

LIMIT = 8 << 20
BUFFER = len(Decoder(LIMIT).scratch)
PREFIX = Struct("<QQIIB3x")

Message = tuple[int, int, dict[str, Any], list[bytes]]
"""Kind, call id, header and segments: what ``encode`` is given."""


def encoded(message: Message) -> bytes:
    buffers, size = encode(*message)
    data = b"".join(buffers)
    assert len(data) == size
    return data


def stream_of(messages: list[Message]) -> bytes:
    return frames.PREAMBLE + b"".join(encoded(message) for message in messages)


def feed(decoder: Decoder, data: bytes, chunks: Iterator[int] | None = None) -> list[Frame]:
    """Passes ``data`` to the decoder as a socket would, at most ``next(chunks)`` bytes at a time."""
    frames: list[Frame] = []
    view = memoryview(data)
    while view:
        buffers = decoder.buffers()
        assert len(buffers[0]) > 0
        if decoder.scratch_offset >= 0:
            assert list(map(len, buffers)) == [decoder.scratch_end - decoder.scratch_offset]
        count = min(sum(map(len, buffers)), len(view), next(chunks) if chunks else len(view))
        rest = view[:count]
        for buffer in buffers:
            part = rest[: len(buffer)]
            buffer[: len(part)] = part
            rest = rest[len(part) :]
        frames += decoder.received(count)
        view = view[count:]
    return frames


def greeted(max_frame_bytes: int = LIMIT) -> Decoder:
    decoder = Decoder(max_frame_bytes)
    assert feed(decoder, frames.PREAMBLE) == []
    return decoder


def as_messages(frames: list[Frame]) -> list[Message]:
    return [
        (frame.kind, frame.call_id, frame.header, [bytes(segment) for segment in frame.buffers])
        for frame in frames
    ]


def prefix(body: int = 0, *, call_id: int = 0, header: int = 0, segments: int = 0, kind: int = 5) -> bytes:
    return PREFIX.pack(body, call_id, header, segments, kind)


u64 = st.integers(0, 2**64 - 1)
texts = st.text(st.characters(exclude_categories=()), max_size=4)
"""Half surrogates included: the texts of exceptions may have them."""
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts
values = (
    scalars
    | st.binary(max_size=4)
    | st.lists(scalars, max_size=3)
    | st.dictionaries(texts, scalars, max_size=2)
)
headers: st.SearchStrategy[dict[str, Any]] = st.just({}) | st.dictionaries(texts, values, max_size=3)
segment_lists = st.lists(st.binary(max_size=80), max_size=6)
kinds = st.integers(0, Kind.OPENING - 1) | st.integers(Kind.CHUNK + 1, 255)
"""All that are not about chunks."""
small_messages = st.tuples(kinds, u64, headers, segment_lists)
sizes_round_the_buffer = st.sampled_from(
    [BUFFER - 28 - 1, BUFFER - 28, BUFFER - 28 + 1, BUFFER, BUFFER + 1, 2 * BUFFER, (1 << 20) - 1, 1 << 20]
)
large_messages = st.tuples(
    st.just(int(frames.Kind.CALL)),
    u64,
    st.sampled_from([{}, {"dtype": "float32"}]),
    st.lists(sizes_round_the_buffer.map(lambda size: bytes([size % 251]) * size), min_size=1, max_size=3),
)
chunkings = st.lists(st.integers(1, 200), min_size=1, max_size=50)


def endless(sizes: list[int]) -> Iterator[int]:
    while True:
        yield from sizes


def packed(value: object) -> bytes:
    data: bytes = msgpack.packb(value)
    return data

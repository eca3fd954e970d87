"""Large messages in chunks: they arrive whole in any order and any pieces; no peer gets more than it may."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.errors import ProtocolError
from rpc.wire import frames, reassembly
from rpc.wire.chunking import CHUNK_BYTES, SHORT_CHUNK_BYTES, Outgoing
from rpc.wire.frames import Kind, chunk_prefix, chunked, encode
from rpc.wire.reassembly import MAX_OPEN, Incomplete, Reassembly, Room
from tests.support.effort import PROFILE, examples
from tests.support.frames import (
    LIMIT,
    Message,
    as_messages,
    encoded,
    endless,
    feed,
    greeted,
    headers,
    prefix,
    small_messages,
    u64,
)

EXAMPLES = settings(PROFILE, max_examples=examples(60))

lengths = st.sampled_from(
    [
        *(0, 1, 15, 16, 17, 5000, 300_000),
        *(SHORT_CHUNK_BYTES - 1, SHORT_CHUNK_BYTES, SHORT_CHUNK_BYTES + 1),
        *(CHUNK_BYTES - 1, CHUNK_BYTES + 1),
    ]
)
segments = st.lists(
    lengths.map(lambda length: bytes([length % 251]) * length), min_size=1, max_size=5
).filter(any)
large = st.tuples(st.sampled_from([Kind.CALL, Kind.REPLY]), u64, headers, segments)
reads = st.lists(st.sampled_from([1, 100, 4096, 70_000]), max_size=9).map(lambda sizes: [*sizes, 1 << 20])


def outgoing(max_bytes: int = LIMIT) -> Outgoing:
    return Outgoing(chunk_prefix, max_bytes, 1 << 40)


def in_chunks(message: Message, number: int) -> bytes:
    """A message in chunks of which nothing else comes between."""
    sender = outgoing()
    sender.add(chunked(*encode(*message), number))
    return drained(sender)


def drained(sender: Outgoing) -> bytes:
    pieces: list[Any] = []
    while sender:
        pieces += sender.next()
    return b"".join(pieces)


def call(*segments: bytes, call_id: int = 1) -> Message:
    return (Kind.CALL, call_id, {}, list(segments))


# ---- there and back


@EXAMPLES
@given(messages=st.lists(large, min_size=1, max_size=10), small=st.lists(small_messages), sizes=reads)
def test_messages_whose_chunks_alternate_arrive_whole(
    messages: list[Message], small: list[Message], sizes: list[int]
) -> None:
    sender = outgoing()
    for number, message in enumerate(messages):
        sender.add(chunked(*encode(*message), number))
    rest = deque(small)
    stream = bytearray()
    while sender:
        stream += b"".join(sender.next())
        if rest:
            stream += encoded(rest.popleft())
    frames = as_messages(feed(greeted(), bytes(stream), endless(sizes)))
    sent = small[: len(small) - len(rest)]
    assert sorted(map(repr, frames)) == sorted(map(repr, messages + sent))
    assert [frame for frame in frames if frame in sent] == [frame for frame in sent if frame in frames]


@EXAMPLES
@given(segments=segments, header=headers)
def test_segments_of_many_bytes_have_memory_of_their_own(
    segments: list[bytes], header: dict[str, Any]
) -> None:
    (frame,) = feed(greeted(), in_chunks((5, 1, header, segments), 7))
    for segment, sent in zip(frame.buffers, segments, strict=True):
        assert segment == sent
        assert not segment.readonly
        if len(sent) >= SHORT_CHUNK_BYTES:
            assert memoryview(segment.obj).nbytes < len(sent) + 32


def sizes_of_chunks(sender: Outgoing) -> list[int]:
    """The numbers of bytes that go out at a time, in units of 128 KiB."""
    sizes: list[int] = []
    while sender:
        sizes.append(sum(map(len, sender.next())) // SHORT_CHUNK_BYTES)
    return sizes


def test_chunks_are_short_for_a_while_after_a_small_message() -> None:
    sender = outgoing()
    sender.add(chunked(*encode(*call(bytes(80 << 20))), 1))
    long = CHUNK_BYTES // SHORT_CHUNK_BYTES
    assert len(sender.next()[-1]) == CHUNK_BYTES
    sender.shorten()
    sizes = sizes_of_chunks(sender)
    assert sizes[:512] == [1] * 512
    assert set(sizes[512:]) == {long}
    assert sum(sizes) * SHORT_CHUNK_BYTES == (80 << 20) - CHUNK_BYTES


def test_no_more_is_opened_than_the_peer_accepts_but_one_message_always_is() -> None:
    each = 3_000_000
    sender = outgoing(2 * each + 100)
    for number in range(70):
        sender.add(chunked(*encode(*call(bytes(each), call_id=number)), number))
    assert len(feed(greeted(2 * each + 100), drained(sender))) == 70


def test_memory_of_what_will_not_come_is_let_go() -> None:
    made: list[weakref.ref[Any]] = []

    def allocate(length: int) -> memoryview:
        block = np.empty(length, np.uint8)
        made.append(weakref.ref(block))
        return block.data

    arriving = Reassembly(allocate)
    arriving.open(1, None, [Room(CHUNK_BYTES, CHUNK_BYTES)])
    arriving.begin(1, 0, SHORT_CHUNK_BYTES)
    assert arriving.filled(1, SHORT_CHUNK_BYTES) is None
    arriving.clear()
    assert made.pop()() is None
    assert not arriving.promised


# ---- what a peer may not do


def opening(
    number: int, *, body: int, header: int = 0, segments: int = 1, kind: int = 5, rest: bytes = b""
) -> bytes:
    inner = prefix(body, header=header, segments=segments, kind=kind) + rest
    return prefix(len(inner), call_id=number, kind=Kind.OPENING) + inner


def chunk(number: int, data: bytes) -> bytes:
    return chunk_prefix(number, 0, len(data)) + data


MALFORMED = {
    "a chunk of nothing": (chunk(1, b"data"), "which is not open"),
    "opened twice": (opening(1, body=10) * 2, "opened twice"),
    "too short an opening": (prefix(5, call_id=1, kind=Kind.OPENING) + b"short", "too short"),
    "over the limit": (opening(1, body=LIMIT + 1), "over the limit"),
    "over the limit together": (opening(1, body=LIMIT - 5) + opening(2, body=6), "are open"),
    "too many": (b"".join(opening(n, body=1) for n in range(MAX_OPEN + 1)), f"more than {MAX_OPEN} messages"),
    "nothing to follow": (opening(1, body=0), "has nothing"),
    "no segments": (opening(1, body=10, segments=0), "malformed opening"),
    "an opening within": (opening(1, body=10, kind=Kind.OPENING), "malformed opening"),
    "a header that is missing": (opening(1, body=10, header=4), "malformed opening"),
    "a header that is none": (opening(1, body=10, header=4, rest=b"\xc1\xc1\xc1\xc1"), "not msgpack"),
    "segments beyond the end": (
        opening(1, body=20, segments=2, rest=(50).to_bytes(8, "little")),
        "buffer 0 of 2 ends beyond",
    ),
    "a chunk too long": (
        opening(1, body=10) + chunk(1, bytes(11)),
        "no chunk of 11 bytes is at 0 in a message of 10",
    ),
    "a chunk behind the end": (
        opening(1, body=10) + chunk_prefix(1, SHORT_CHUNK_BYTES, SHORT_CHUNK_BYTES),
        "no chunk of",
    ),
    "an empty chunk": (opening(1, body=10) + chunk(1, b""), "no chunk of 0 bytes"),
    "a chunk after the end": (opening(1, body=4) + chunk(1, b"done") + chunk(1, b"more"), "not open"),
    "a chunk beside the grid": (
        opening(1, body=10) + chunk_prefix(1, 5, 5) + bytes(5),
        "no chunk of 5 bytes is at 5 in a message of 10",
    ),
    "a chunk that comes twice": (
        opening(1, body=2 * SHORT_CHUNK_BYTES) + chunk(1, bytes(SHORT_CHUNK_BYTES)) * 2,
        "has come twice",
    ),
}


@pytest.mark.parametrize(("data", "complaint"), MALFORMED.values(), ids=MALFORMED.keys())
def test_what_a_peer_must_not_send_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        feed(greeted(), data)


def test_nothing_is_opened_for_who_may_send_no_message_so_large_that_it_comes_in_chunks() -> None:
    with pytest.raises(ProtocolError, match="none over 65536 bytes"):
        feed(greeted(64 << 10), opening(1, body=10))


def test_a_message_without_memory_arrives_incomplete_and_the_next_one_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise OSError(12, "Cannot allocate memory")

    large = bytes([7]) * (4 << 20)
    decoder = greeted(16 << 20)
    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", refuse)
        stream = in_chunks((Kind.CALL, 5, {"key": 1}, [b"first", large]), 1)
        stream += encoded((Kind.CALL, 6, {}, [b"small"]))
        lost, small = feed(decoder, stream)
    assert (lost.kind, lost.call_id, lost.header) == (Kind.CALL, 5, {"key": 1})
    assert isinstance(lost.buffers, Incomplete)
    assert len(lost.buffers) == 2
    assert "no memory for a frame of 4194304 bytes" in lost.buffers.reason
    assert bytes(small.buffers[0]) == b"small"
    (whole,) = feed(decoder, in_chunks((Kind.CALL, 7, {}, [b"first", large]), 2))
    assert bytes(whole.buffers[1]) == large


few = st.integers(0, 3)
UNCLEARED = 0xA5
"""What memory is full of here that nobody has cleared; a peer sends it nowhere else than in lengths."""

sent_bytes = st.integers(0, 80).map(bytes)
cut_off = st.binary(max_size=20).filter(lambda data: UNCLEARED not in data)
mostly_valid = st.builds(
    opening, few, body=st.integers(1, 80), segments=st.integers(1, 3), rest=sent_bytes | cut_off
) | st.builds(chunk, few, sent_bytes)
in_order = st.lists(segments.filter(lambda each: all(len(part) < CHUNK_BYTES for part in each)), max_size=2)


@settings(PROFILE, max_examples=examples(300))
@given(
    frames=st.lists(mostly_valid, max_size=12),
    messages=in_order,
    keep=st.integers(0, 1 << 20),
    sizes=reads,
)
def test_no_stream_shows_memory_that_nobody_has_cleared(
    frames: list[bytes], messages: list[list[bytes]], keep: int, sizes: list[int]
) -> None:
    """However it is cut off, and whatever it opens and never fills."""
    stream = b"".join(
        [*frames, *(in_chunks(call(*each), 10 + number) for number, each in enumerate(messages))]
    )

    def allocate(length: int) -> memoryview:
        return memoryview(bytearray([UNCLEARED]) * length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rpc.wire.decoder.allocate", allocate)
        for data in (stream, stream[:keep]):
            with contextlib.suppress(ProtocolError):
                for frame in feed(greeted(), data, endless(sizes)):
                    for segment in frame.buffers:
                        assert UNCLEARED not in bytes(segment)


def test_memory_for_what_arrives_is_writable_and_aligned_for_every_type() -> None:
    for length in (0, 1, 5000, SHORT_CHUNK_BYTES, (4 << 20) - 1, 4 << 20, (4 << 20) + 1):
        memory = reassembly.allocate(length)
        assert not memory.readonly
        assert len(memory) == length
        assert np.frombuffer(memory, np.uint8).__array_interface__["data"][0] % frames.ALIGNMENT == 0


def test_segments_of_all_open_messages_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reassembly, "MAX_BUFFERS", 1001)
    arriving = Reassembly(lambda length: memoryview(bytearray(length)))
    arriving.open(1, None, [Room(1, 1)] + [Room(0, 0)] * 999)
    with pytest.raises(ProtocolError, match="buffers"):
        arriving.open(2, None, [Room(1, 1)] * 2)
    arriving.filled(1, 1)
    arriving.open(2, None, [Room(1, 1)] * 2)


def test_a_message_over_the_limit_may_follow_what_raises_the_limit() -> None:
    decoder = greeted(100)
    (welcome,) = feed(decoder, encoded(call(b"welcome")) + in_chunks(call(bytes(500)), 1)[:200])
    assert welcome.buffers == [b"welcome"]
    assert decoder.postponed
    decoder.max_frame_bytes = LIMIT
    assert decoder.received(0) == []
    (frame,) = feed(decoder, in_chunks(call(bytes(500)), 1)[200:])
    assert frame.buffers == [bytes(500)]

"""The wire format: every frame comes back as it was, however the bytes arrive; all else is refused."""

from __future__ import annotations

import ctypes
import mmap
import os
from struct import Struct
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.errors import ProtocolError
from rpc.wire import frames
from rpc.wire.decoder import Decoder
from rpc.wire.frames import decode_one, encode, encode_small
from rpc.wire.reassembly import MAX_BUFFERS
from tests.support.effort import PROFILE, examples
from tests.support.frames import (
    BUFFER,
    LIMIT,
    Message,
    as_messages,
    chunkings,
    encoded,
    endless,
    feed,
    greeted,
    headers,
    large_messages,
    packed,
    prefix,
    small_messages,
    stream_of,
)


@PROFILE
@given(messages=st.lists(small_messages, max_size=4), sizes=chunkings)
def test_frames_arrive_as_sent_however_the_stream_is_cut(messages: list[Message], sizes: list[int]) -> None:
    decoder = Decoder(LIMIT)
    assert as_messages(feed(decoder, stream_of(messages), endless(sizes))) == messages


@settings(PROFILE, max_examples=examples(30))
@given(
    messages=st.lists(large_messages | small_messages, min_size=1, max_size=4),
    sizes=st.lists(st.sampled_from([1, 27, 4096, 1 << 20]), min_size=1, max_size=4).filter(
        lambda sizes: max(sizes) >= 4096
    ),
    share=st.floats(0, 1),
)
def test_the_receive_buffer_may_grow_anywhere(
    messages: list[Message], sizes: list[int], share: float
) -> None:
    decoder, stream, chunks = Decoder(LIMIT, 4096), stream_of(messages), endless(sizes)
    cut = int(share * len(stream))
    frames = feed(decoder, stream[:cut], chunks)
    assert len(decoder.scratch) == 4096
    decoder.grow()
    assert as_messages(frames + feed(decoder, stream[cut:], chunks)) == messages
    assert len(decoder.scratch) == BUFFER


@PROFILE
@given(segments=st.lists(st.binary(max_size=40), min_size=2, max_size=6), header=headers)
def test_tensors_start_at_multiples_of_16_within_the_body(
    segments: list[bytes], header: dict[str, Any]
) -> None:
    (frame,) = feed(greeted(), encoded((5, 0, header, segments)))
    for segment in frame.buffers[1:]:
        if len(segment):
            body = segment.obj
            offset = _address(segment) - _address(memoryview(body))
            assert offset % frames.ALIGNMENT == 0


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_segments_are_sent_without_being_copied() -> None:
    pickled, tensor = bytearray(100), bytearray(1000)
    buffers, _ = encode(5, 0, {}, [pickled, tensor])
    assert [buffer for buffer in buffers if buffer is pickled or buffer is tensor] == [pickled, tensor]


@PROFILE
@given(header=headers, segments=st.lists(st.binary(max_size=80), max_size=1))
def test_the_short_form_is_the_same_frame(header: dict[str, Any], segments: list[bytes]) -> None:
    assert encode_small(5, 77, header, segments) == encoded((5, 77, header, segments))


@pytest.mark.parametrize("size", [10, BUFFER, 2 << 20])
def test_segments_are_writable_and_belong_to_their_receiver(size: int) -> None:
    decoder = greeted()
    message: Message = (5, 0, {}, [b"a" * size, b"b" * size])
    (first,) = feed(decoder, encoded(message))
    (second,) = feed(decoder, encoded(message))
    for segment in second.buffers:
        segment[:] = b"c" * size
    assert as_messages([first]) == [message]


@pytest.mark.parametrize("size", [10, 2 << 20])
def test_a_forked_child_has_received_tensors_to_itself(size: int) -> None:
    (frame,) = feed(greeted(), encoded((5, 0, {}, [b"a" * size])))
    child = os.fork()
    if not child:
        frame.buffers[0][:1] = b"b"
        os._exit(0)
    os.waitpid(child, 0)
    assert bytes(frame.buffers[0][:1]) == b"a"


@PROFILE
@given(message=small_messages)
def test_one_frame_is_decoded_in_place(message: Message) -> None:
    data = bytearray(encoded(message))
    frame = decode_one(data)
    assert as_messages([frame]) == [message]
    assert all(segment.obj is data for segment in frame.buffers)


# ---- what is refused


@pytest.mark.parametrize(
    ("greeting", "complaint"),
    [
        (b"GET / HTTP/1.1\r\n", r"does not speak farcall's protocol \(it began with b'GET / HT'\)"),
        (b"\x16\x03\x01", "it uses TLS, and this worker does not"),
        (b"farcalX", "does not speak farcall's protocol"),
        (b"farcall\x09", f"version 9 of farcall's protocol, this worker version {frames.PROTOCOL_VERSION}"),
    ],
)
def test_a_peer_that_speaks_another_protocol_or_version_is_refused(greeting: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        feed(Decoder(LIMIT), greeting)


MALFORMED = {
    "over the frame limit": (prefix(LIMIT + 1), f"frame of {LIMIT + 1} bytes is over the limit of {LIMIT}"),
    "header over its limit": (
        prefix(LIMIT, header=frames.MAX_HEADER_BYTES + 1),
        r"a header of \d+ bytes is over the limits",
    ),
    "header longer than the body": (prefix(10, header=11), "cannot hold 0 buffers and a header of 11 bytes"),
    "too many segments": (prefix(LIMIT, segments=MAX_BUFFERS + 1), r"of 1048577 buffers .* is over"),
    "table longer than the body": (prefix(15, segments=3), "cannot hold 3 buffers"),
    "table and header longer than the body": (prefix(16, segments=2, header=9), "cannot hold 2 buffers"),
    "bytes of no segment": (prefix(4) + b"left", "4 bytes of a frame belong to no buffer"),
    "bytes after the header": (prefix(2, header=1) + packed({}) + b"x", "1 bytes of a frame belong to no"),
    "segment longer than the body": (
        prefix(8 + 4, segments=2) + Struct("<Q").pack(5) + b"four",
        "buffer 0 of 2 ends beyond its frame of 12 bytes",
    ),
    "no room for the padding": (
        prefix(8 + 4, segments=2) + Struct("<Q").pack(4) + b"four",
        "buffer 1 of 2 ends beyond",
    ),
    "header not msgpack": (prefix(1, header=1) + b"\xc1", "header is not msgpack"),
    "header with something after it": (prefix(2, header=2) + packed({}) + b"\0", "header is not msgpack"),
    "header not a map": (prefix(3, header=3) + packed([1, 2]), "header is a list, not a map"),
    "header with text that is not UTF-8": (
        prefix(4, header=4) + b"\x81\xa1\xff\x01",
        "header is not msgpack",
    ),
    "header with a list for a key": (prefix(3, header=3) + b"\x81\x90\x01", "header is not msgpack"),
    "header nested without end": (prefix(4000, header=4000) + b"\x91" * 4000, "header is not msgpack"),
    "header that announces more than there is": (
        prefix(6, header=6) + b"\x81\xdd\xff\xff\xff\xff",
        "header is not msgpack",
    ),
}


@pytest.mark.parametrize(("data", "complaint"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_frame_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        feed(greeted(), data)


@pytest.mark.parametrize(
    "data",
    [data for name, (data, _) in MALFORMED.items() if "frame limit" not in name]
    + [b"", b"short", prefix(1), prefix(0) + b"more"],
)
def test_one_malformed_frame_in_memory_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_one(bytearray(data))


def test_a_frame_behind_the_one_that_raises_the_limit_is_read_with_the_new_limit() -> None:
    small, large = encode_small(5, 1, {}, [b"small"]), encode_small(5, 2, {}, [b"0123456789a"])
    decoder = greeted(max_frame_bytes=10)
    assert [frame.call_id for frame in feed(decoder, small + large)] == [1]
    assert decoder.postponed
    decoder.max_frame_bytes = 11
    assert [frame.call_id for frame in decoder.received(0)] == [2]
    assert not decoder.postponed


def test_a_frame_behind_another_is_refused_when_the_limit_stays() -> None:
    small, large = encode_small(5, 1, {}, [b"small"]), encode_small(5, 2, {}, [b"0123456789a"])
    decoder = greeted(max_frame_bytes=10)
    assert len(feed(decoder, small + large)) == 1
    with pytest.raises(ProtocolError, match="over the limit of 10"):
        decoder.received(0)


def test_a_header_over_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_HEADER_BYTES", 10)
    with pytest.raises(ProtocolError, match="a header of 15 bytes is over the limit of 10"):
        encode(5, 0, {"key": "123456789"}, ())


def test_more_segments_than_the_limit_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_BUFFERS", 2)
    encode(5, 0, {}, [b"", b""])
    with pytest.raises(ProtocolError, match="a frame of 3 buffers is over the limit of 2"):
        encode(5, 0, {}, [b"", b"", b""])


def test_a_frame_that_finds_no_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*args: object, **kwargs: object) -> NoReturn:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", out_of_memory)
    with pytest.raises(ProtocolError, match="there is no memory for a frame of 4194304 bytes"):
        feed(greeted(), prefix(4 << 20, segments=1))


@pytest.mark.parametrize("count", [2, 3, 1000, 20_000])
def test_a_frame_may_have_many_segments(count: int) -> None:
    segments = [bytes([index % 256]) * (index % 7) for index in range(count)]
    message: Message = (5, 7, {"tensors": count}, segments)
    assert as_messages(feed(Decoder(LIMIT), stream_of([message]))) == [message]


def test_a_wrong_first_byte_is_refused_without_waiting_for_more() -> None:
    with pytest.raises(ProtocolError, match="does not speak"):
        feed(Decoder(LIMIT), b"G")

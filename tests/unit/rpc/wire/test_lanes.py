"""Large messages over several connections: whole in any order of events, and hostile ones refused."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.errors import ProtocolError
from rpc.wire.chunking import SHORT_CHUNK_BYTES, Outgoing, Reassembly, allocate
from rpc.wire.frames import Decoder, Frame, Kind, chunk_prefix, chunked, encode
from tests.support.effort import EFFORT, PROFILE
from tests.support.frames import LIMIT, feed, greeted, prefix

LANES = 3


def lanes(limit: int = LIMIT) -> list[Decoder]:
    """The receiving ends of all lanes."""
    arriving = Reassembly(allocate, LANES)
    made = [greeted(limit) for _ in range(LANES)]
    for lane, decoder in enumerate(made):
        decoder.lane, decoder.arriving = lane, arriving
    return made


def opening(number: int, body: int) -> bytes:
    inner = prefix(body, segments=1)
    return prefix(len(inner), call_id=number, kind=Kind.OPENING) + inner


def chunk(number: int, offset: int, data: bytes) -> bytes:
    return chunk_prefix(number, offset, len(data)) + data


@settings(PROFILE, max_examples=60 * EFFORT)
@given(
    sizes=st.lists(st.sampled_from([1, 130_000, 600_000, 1_700_000]), min_size=1, max_size=5),
    small=st.booleans(),
    data=st.data(),
)
def test_messages_arrive_whole_in_whatever_order_lanes_take_and_bring_chunks(
    sizes: list[int], small: bool, data: st.DataObject
) -> None:
    sender = Outgoing(chunk_prefix, LIMIT, 1 << 40)
    if small:
        sender.shorten()
    for number, size in enumerate(sizes):
        pieces, length = encode(Kind.CALL, number, {}, [b"pickle", bytes([number]) * size])
        sender.add(chunked(pieces, length, number))
    decoders = lanes()
    under_way: list[deque[bytes]] = [deque() for _ in range(LANES)]
    frames: list[Frame] = []
    while sender or any(under_way):
        lane = data.draw(st.integers(0, LANES - 1))
        if data.draw(st.booleans()) and under_way[lane]:
            frames += feed(decoders[lane], under_way[lane].popleft())
        elif sender:
            pieces = [bytes(piece) for piece in sender.next(lane)]
            middle = len(pieces) // 2
            under_way[lane] += filter(None, [b"".join(pieces[:middle]), b"".join(pieces[middle:])])
        else:
            lane = next(index for index in range(LANES) if under_way[index])
            frames += feed(decoders[lane], under_way[lane].popleft())
    assert sorted(frame.call_id for frame in frames) == list(range(len(sizes)))
    for frame in frames:
        assert frame.buffers == [b"pickle", bytes([frame.call_id]) * sizes[frame.call_id]]
    assert not decoders[0].arriving
    assert decoders[0].arriving.promised == 0


def test_a_message_is_begun_on_the_first_lane_so_that_it_overtakes_nothing_sent_there_before() -> None:
    sender, decoders = Outgoing(chunk_prefix, LIMIT, 1 << 40), lanes()
    woken: list[int] = []
    sender.other_lanes += [lambda: woken.append(1), lambda: woken.append(2)]
    pieces, length = encode(Kind.CALL, 7, {}, [b"", bytes(1_200_000)])
    sender.add(chunked(pieces, length, 7))
    assert not sender.has_for(1)
    assert sender.next(1) == []
    assert woken == []
    first = b"".join(sender.next(0))
    assert woken == [1, 2]
    for lane in (1, 2):
        assert sender.has_for(lane)
        assert feed(decoders[lane], b"".join(sender.next(lane))) == []
    assert woken == [1, 2] * 2  # nothing is left: a lane may end
    assert [frame.call_id for frame in feed(decoders[0], first)] == [7]


@pytest.mark.parametrize(
    ("lane", "said", "complaint"),
    [
        (0, opening(1, 300_000), "opened twice"),
        (1, opening(1, 300_000) * 2, "opened twice"),
        (1, chunk(1, 0, bytes(SHORT_CHUNK_BYTES)), "has come twice"),
        (1, chunk(1, 1, bytes(100)), "no chunk of 100 bytes is at 1 "),
        (1, chunk(1, 2 * SHORT_CHUNK_BYTES, bytes(100)), "no chunk of 100 bytes"),
        (1, chunk_prefix(1, 1 << 63, 100) + bytes(100), "no chunk of 100 bytes"),
        (1, chunk(2, 0, b"data"), "not open"),
    ],
)
def test_what_a_peer_must_not_send_on_any_lane_is_refused(lane: int, said: bytes, complaint: str) -> None:
    decoders = lanes()
    feed(decoders[0], opening(1, 300_000) + chunk(1, 0, bytes(SHORT_CHUNK_BYTES)))
    with pytest.raises(ProtocolError, match=complaint):
        feed(decoders[lane], said)


@settings(PROFILE, max_examples=200 * EFFORT)
@given(
    said=st.lists(
        st.tuples(
            st.integers(0, LANES - 1),
            st.builds(opening, st.integers(0, 2), st.integers(0, 60))
            | st.builds(chunk, st.integers(0, 2), st.integers(0, 3), st.binary(max_size=60))
            | st.builds(chunk, st.integers(0, 2), st.just(0), st.binary(max_size=60)),
        ),
        max_size=15,
    )
)
def test_whatever_a_peer_says_is_a_message_or_an_error_of_the_protocol(
    said: list[tuple[int, bytes]],
) -> None:
    decoders = lanes()
    try:
        for lane, data in said:
            for frame in feed(decoders[lane], data):
                assert len(frame.buffers) == 1
    except ProtocolError:
        return
    assert decoders[0].arriving.promised >= 0


def test_the_end_of_a_lane_takes_nothing_from_others_and_the_end_of_the_first_takes_all() -> None:
    first, second, _ = lanes()
    feed(first, opening(1, 300_000))
    second.clear()
    assert first.arriving.promised == 300_000
    first.clear()
    assert first.arriving.promised == 0


def test_while_a_lane_takes_a_chunk_others_find_the_message_still_there() -> None:
    """Else what is to be said last could be said before its end."""
    seen: list[bool] = []

    def prefix_of_chunk(number: int, offset: int, length: int) -> bytes:
        seen.append(bool(sender) and sender.has_for(1))
        return chunk_prefix(number, offset, length)

    sender = Outgoing(prefix_of_chunk, LIMIT, 1 << 40)
    pieces, length = encode(Kind.CALL, 1, {}, [b"pickle", bytes(1_700_000)])
    sender.add(chunked(pieces, length, 1))
    while sender:
        sender.next(0)
    assert len(seen) > 1
    assert all(seen)

"""Large messages are received straight into posted buffers, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.bulk.matching import WINDOW
from rpc.bulk.point_to_point import RESERVED_TAGS
from rpc.errors import ProtocolError, RpcError
from rpc.wire import reassembly
from rpc.wire.chunking import CHUNK_BYTES
from rpc.wire.frames import Kind, chunk_prefix, encode
from rpc.wire.reassembly import Room
from tests.support.effort import PROFILE, examples
from tests.unit.rpc.bulk.wired import End, Pair, message

TAG = 7
SIZE = 3 * CHUNK_BYTES + 1000
GUARD = 64
UNTOUCHED = 0xEE


def numbers(size: int = SIZE, first: int = 0) -> np.ndarray:
    """Bytes that tell where they belong."""
    return ((np.arange(size) + first) % 251).astype(np.uint8)


class Buffer:
    """A buffer between guards: bytes that nobody may write to."""

    def __init__(self, size: int = SIZE) -> None:
        self._whole = np.full(size + 2 * GUARD, UNTOUCHED, np.uint8)
        self.bytes = self._whole[GUARD : GUARD + size]

    def has(self, expected: np.ndarray) -> bool:
        return bool((self.bytes == expected).all()) and self.is_guarded()

    def is_untouched(self) -> bool:
        return bool((self._whole == UNTOUCHED).all())

    def is_guarded(self) -> bool:
        return bool((self._whole[:GUARD] == UNTOUCHED).all() and (self._whole[-GUARD:] == UNTOUCHED).all())

    def wipe(self) -> None:
        self._whole[:] = UNTOUCHED


@settings(PROFILE, max_examples=examples(40))
@given(st.data())
def test_however_sender_and_receiver_divide_a_message(data: st.DataObject) -> None:
    def divided(whole: np.ndarray) -> list[np.ndarray]:
        cuts = data.draw(st.lists(st.integers(0, SIZE), max_size=4))
        return np.split(whole, sorted(cuts))

    end, buffer = End("peer", 1), Buffer()
    posted = end.bulk.post(end.peer, TAG, divided(buffer.bytes))
    for chunk in message(TAG, 0, divided(numbers())):
        end.receive(chunk)
    assert posted.done()
    assert buffer.has(numbers())


PLACES = [1, 100, CHUNK_BYTES // 2, CHUNK_BYTES + 200, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES + 500]


@pytest.mark.parametrize("place", PLACES)
def test_a_post_that_is_cancelled_is_not_written_to_and_the_message_goes_to_the_next(place: int) -> None:
    end, cancelled, following = End("peer", 1), Buffer(), Buffer()
    first = end.bulk.post(end.peer, TAG, cancelled.bytes)
    second = end.bulk.post(end.peer, TAG, following.bytes)
    data = b"".join(message(TAG, 0, [numbers()]))
    end.receive(data[:place])
    assert first.cancel("enough")
    cancelled.wipe()
    end.receive(data[place:])
    second.wait(1)
    assert cancelled.is_untouched()
    assert following.has(numbers())
    with pytest.raises(RpcError, match="enough"):
        first.wait()


@pytest.mark.parametrize("place", PLACES)
def test_a_message_that_is_coming_moves_up_when_an_earlier_post_is_cancelled(place: int) -> None:
    end, buffers = End("peer", 1), [Buffer() for _ in range(3)]
    posts = [end.bulk.post(end.peer, TAG, each.bytes) for each in buffers]
    second = b"".join(message(TAG, 1, [numbers(first=1)]))
    end.receive(second[:place])  # it has overtaken the first
    assert posts[0].cancel()
    for each in buffers:
        each.wipe()
    end.receive(second[place:])
    assert not any(each.done() for each in posts[1:])
    for data in message(TAG, 0, [numbers()]):
        end.receive(data)
    assert buffers[0].is_untouched()
    for number, post in enumerate(posts[1:]):
        post.wait(1)
        assert buffers[number + 1].has(numbers(first=number))


@pytest.mark.parametrize(("sent", "posted"), [(1000, 1), (1, 1000)])
def test_how_many_buffers_are_open_is_known_however_messages_are_divided(
    sent: int, posted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reassembly, "MAX_BUFFERS", 1500)
    end = End("peer", 1)
    whole = np.zeros(SIZE, np.uint8)
    end.bulk.post(end.peer, TAG, np.array_split(whole, posted))
    for data in message(TAG, 0, np.array_split(numbers(), sent)):
        end.receive(data)
    assert (whole == numbers()).all()
    most = [Room(1, 1)] * 1500
    arriving = end.decoder.arriving
    arriving.open(1, None, most)
    with pytest.raises(ProtocolError, match="more than"):
        arriving.open(2, None, most[:1])


def test_a_message_that_is_here_before_its_turn_leaves_a_cancelled_buffer() -> None:
    end, buffers = End("peer", 1), [Buffer() for _ in range(3)]
    posts = [end.bulk.post(end.peer, TAG, each.bytes) for each in buffers]
    for data in message(TAG, 1, [numbers(first=1)]):
        end.receive(data)
    assert posts[1].cancel()
    buffers[1].wipe()
    for data in message(TAG, 0, [numbers()]):
        end.receive(data)
    posts[2].wait(1)
    assert buffers[0].has(numbers())
    assert buffers[1].is_untouched()
    assert buffers[2].has(numbers(first=1))


# ---- what a peer may not do


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1, SIZE + 16, 2 * SIZE])
def test_a_message_of_another_size_touches_no_buffer(size: int) -> None:
    end, buffer = End("peer", 1), Buffer()
    posted = end.bulk.post(end.peer, TAG, buffer.bytes)
    for data in message(TAG, 0, [numbers(size)]):
        end.receive(data)
    with pytest.raises(RpcError, match=f"the message has {size} bytes, not {SIZE}"):
        posted.wait(1)
    assert buffer.is_untouched()


def small(number: int) -> bytes:
    buffers, _ = encode(Kind.BULK, (TAG << 32) + number, {}, [bytes(8)])
    return b"".join(map(bytes, buffers))


AGAIN = {"small": [small(0)], "large": message(TAG, 0, [numbers(first=9)], opened_as=1)}


@pytest.mark.parametrize("again", AGAIN.values(), ids=AGAIN)
def test_a_number_that_comes_twice_is_refused_while_the_first_is_coming(again: list[bytes]) -> None:
    end, buffer = End("peer", 1), Buffer()
    posted = end.bulk.post(end.peer, TAG, buffer.bytes)
    end.receive(message(TAG, 0, [numbers()])[0])
    with pytest.raises(ProtocolError, match="comes twice"):
        end.receive(b"".join(again))
    assert not posted.done()
    assert buffer.is_guarded()


@pytest.mark.parametrize("offset", [CHUNK_BYTES, 3 * CHUNK_BYTES, 4 * CHUNK_BYTES, 1 << 40])
def test_a_chunk_that_goes_beyond_its_message_is_refused(offset: int) -> None:
    end, buffer = End("peer", 1), Buffer()
    end.bulk.post(end.peer, TAG, buffer.bytes)
    end.receive(message(TAG, 0, [numbers()])[0])
    with pytest.raises(ProtocolError, match="no chunk of"):
        end.receive(chunk_prefix(0, offset, SIZE) + bytes(100))
    assert buffer.is_guarded()


# ---- tags that are closed


def test_a_tag_that_both_have_closed_is_forgotten() -> None:
    pair = Pair()
    buffer = Buffer()
    pair.left.bulk.post(pair.left.peer, TAG, buffer.bytes)
    for size in (10, SIZE):
        pair.right.bulk.send(pair.right.peer, TAG, numbers(size))
    for end in (pair.left, pair.right):
        assert end.bulk.tags == 1
        end.bulk.close_tag(end.peer, TAG)
    pair.deliver()
    assert pair.left.bulk.tags == pair.right.bulk.tags == 0


def test_what_comes_under_a_closed_tag_is_dropped_and_its_sender_goes_on() -> None:
    pair = Pair()
    pair.left.bulk.close_tag(pair.left.peer, TAG)
    pair.deliver()
    sent = [pair.right.bulk.send(pair.right.peer, TAG, numbers()) for _ in range(2 * WINDOW // SIZE)]
    pair.deliver()
    assert all(each.done() and each.error() is None for each in sent)
    assert (pair.left.bulk.tags, pair.right.bulk.tags) == (1, 1)
    pair.right.bulk.close_tag(pair.right.peer, TAG)
    pair.deliver()
    assert pair.left.bulk.tags == pair.right.bulk.tags == 0


def test_closing_a_tag_ends_what_waits_and_lets_go_of_buffers() -> None:
    end, buffer = End("peer", 1), Buffer()
    posted = end.bulk.post(end.peer, TAG, buffer.bytes)
    first, *rest = message(TAG, 0, [numbers()])
    end.receive(first)
    end.bulk.close_tag(end.peer, TAG)
    buffer.wipe()
    for data in rest:
        end.receive(data)
    assert buffer.is_untouched()
    with pytest.raises(RpcError, match="has closed the tag"):
        posted.wait()
    with pytest.raises(RpcError, match="has closed tag 7"):
        end.bulk.post(end.peer, TAG)
    with pytest.raises(RpcError, match="has closed tag 7"):
        end.bulk.send(end.peer, TAG, b"late")


def test_who_waits_for_more_than_was_sent_before_a_tag_was_closed_is_told() -> None:
    pair = Pair()
    pair.left.bulk.send(pair.left.peer, TAG, b"the last")
    posts = [pair.right.bulk.post(pair.right.peer, TAG) for _ in range(2)]
    pair.left.bulk.close_tag(pair.left.peer, TAG)
    pair.deliver()
    assert b"".join(posts[0].wait(1)) == b"the last"
    with pytest.raises(RpcError, match="will not come"):
        posts[1].wait(1)
    with pytest.raises(RpcError, match="will not come"):
        pair.right.bulk.post(pair.right.peer, TAG)


def closing(tag: int, end: bytes) -> bytes:
    buffers, _ = encode(Kind.BULK_CLOSE, tag, {}, [end])
    return b"".join(map(bytes, buffers))


@pytest.mark.parametrize(
    "said",
    [closing(TAG, b""), closing(TAG, bytes(5)), closing(1 << 32, bytes(4)), 2 * closing(TAG, bytes(4))],
    ids=["nothing", "too long", "no tag", "twice"],
)
def test_a_malformed_closing_is_refused(said: bytes) -> None:
    with pytest.raises(ProtocolError):
        End("peer", 1).receive(said)


def test_a_closing_that_counts_fewer_messages_than_have_begun_to_come_is_refused() -> None:
    end, buffer = End("peer", 1), Buffer()
    posted = end.bulk.post(end.peer, TAG, buffer.bytes)
    end.receive(message(TAG, 0, [numbers()])[0])
    with pytest.raises(ProtocolError, match="message 0 of tag 7 comes after the last"):
        end.receive(closing(TAG, bytes(4)))
    assert not posted.done()  # it fails with the connection, when nothing is written to its buffer any more


def test_a_credit_for_a_tag_that_nobody_knows_any_more_changes_nothing() -> None:
    end = End("peer", 1)
    buffers, _ = encode(Kind.BULK_CREDIT, TAG, {}, [bytes(16)])
    end.receive(b"".join(map(bytes, buffers)))
    assert end.bulk.tags == 0


def test_reserved_tags_are_given_once() -> None:
    bulk, peer = (end := End("peer", 1)).bulk, end.peer
    given = [bulk.reserve(peer, 3) for _ in range(100)]
    assert given == list(range(RESERVED_TAGS, RESERVED_TAGS + 300, 3))
    bulk.reserve(peer, RESERVED_TAGS - 300)
    with pytest.raises(RpcError, match="were used once"):
        bulk.reserve(peer, 1)

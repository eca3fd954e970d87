"""Messages of a stream fill posts in order, and a sender runs ahead no farther than its window."""

from __future__ import annotations

import itertools

import pytest

from rpc.bulk.matching import REPORT, SEQUENCES, WINDOW, Inbound, Outbound, cost
from rpc.errors import ProtocolError

POST = -1


@pytest.mark.parametrize("count", range(1, 5))
def test_in_every_order_of_posts_and_arrivals_the_nth_message_fills_the_nth_post(count: int) -> None:
    events = [POST] * count + list(range(count))
    for order in set(itertools.permutations(events)):
        inbound: Inbound[int, int] = Inbound()
        posts = itertools.count()
        pairs = []
        for event in order:
            matched = inbound.posted(next(posts)) if event == POST else inbound.arrived(event, event, 8)
            assert len(matched) <= 1 or event != POST
            pairs += matched
        assert pairs == [(each, each) for each in range(count)]
        assert not inbound
        assert inbound.matched == count * cost(8)


@pytest.mark.parametrize("withdrawn", range(3))
def test_a_message_goes_to_the_next_post_when_one_is_taken_back(withdrawn: int) -> None:
    inbound: Inbound[str, int] = Inbound()
    posts = ["a", "b", "c"]
    for post in posts:
        assert not inbound.posted(post)
    assert inbound.withdraw(posts.pop(withdrawn))
    assert [pair for number in range(2) for pair in inbound.arrived(number, number, 8)] == [
        (posts[0], 0),
        (posts[1], 1),
    ]
    assert not inbound.withdraw(posts[0])


def test_sequence_numbers_go_round() -> None:
    inbound: Inbound[int, int] = Inbound(SEQUENCES - 2)
    outbound: Outbound[int] = Outbound(SEQUENCES - 2)
    for number in range(4):
        outbound.add(number, 8)
        inbound.posted(number)
    sent = [outbound.next() for _ in range(4)]
    assert [each[0] for each in sent if each] == [SEQUENCES - 2, SEQUENCES - 1, 0, 1]
    pairs = []
    for each in reversed(sent):
        assert each is not None
        pairs += inbound.arrived(*each, 8)
    assert pairs == [(number, number) for number in range(4)]


SIZES = [0, 8, REPORT - cost(0), REPORT, WINDOW // 3, WINDOW - cost(0), WINDOW, 4 * WINDOW]


def test_a_sender_that_keeps_to_the_window_is_never_refused_and_never_stuck() -> None:
    """Its receiver posts only when nothing more is sent, and reports only what must be reported."""
    for sizes in itertools.product(SIZES, repeat=3):
        send_all(sizes)


def send_all(sizes: tuple[int, ...]) -> None:
    inbound: Inbound[int, int] = Inbound()
    outbound: Outbound[int] = Outbound()
    pending = [*sizes, *reversed(sizes)]
    for number, size in enumerate(pending):
        outbound.add(number, size)
    received: list[int] = []
    under_way: list[tuple[int, int]] = []
    while len(received) < len(pending):
        while following := outbound.next():
            under_way.append(following)
        matched = []
        for sequence, number in reversed(under_way):  # large ones are overtaken
            matched += inbound.arrived(sequence, number, pending[number])
        under_way = []
        matched += inbound.posted(len(received))
        assert len(matched) == 1
        received += [number for _, number in matched]
        if inbound.is_report_due():
            outbound.reported(inbound.matched)
    assert received == list(range(len(pending)))
    assert not outbound


def test_what_is_not_reported_stops_no_sender() -> None:
    """The receiver says nothing about less than a report; the window has room for that."""
    assert REPORT < WINDOW // 2
    inbound: Inbound[int, int] = Inbound()
    outbound: Outbound[int] = Outbound()
    for number in range(200_000):
        outbound.add(number, 8)
        inbound.posted(number)
        following = outbound.next()
        assert following is not None
        inbound.arrived(*following, 8)
        if inbound.is_report_due():
            outbound.reported(inbound.matched)


def test_a_number_that_was_used_or_is_far_ahead_is_an_error() -> None:
    for number in (0, 1, SEQUENCES - 1, SEQUENCES // 2, WINDOW // cost(0) + 2):
        inbound: Inbound[int, int] = Inbound()
        inbound.posted(0)
        inbound.arrived(0, 0, 8)
        inbound.arrived(1, 1, 8)
        with pytest.raises(ProtocolError):
            inbound.arrived(number, 0, 8)


def test_a_sender_that_ignores_the_window_is_an_error() -> None:
    inbound: Inbound[int, int] = Inbound()
    inbound.arrived(0, 0, 4 * WINDOW)
    inbound.arrived(1, 1, REPORT)
    with pytest.raises(ProtocolError):
        inbound.arrived(2, 2, WINDOW)


def test_nobody_matches_more_than_was_sent() -> None:
    outbound: Outbound[int] = Outbound()
    outbound.add(0, 8)
    outbound.next()
    with pytest.raises(ProtocolError):
        outbound.reported(cost(8) + 1)
    outbound.reported(cost(8))
    outbound.reported(0)  # overtaken by the one before
    assert outbound.next() is None


def test_a_message_that_waits_can_be_taken_back_and_leaves_no_gap() -> None:
    outbound: Outbound[str] = Outbound()
    for message, size in (("large", 2 * WINDOW), ("waits", 8), ("last", 8)):
        outbound.add(message, size)
    assert outbound.next() == (0, "large")
    assert outbound.next() is None
    assert outbound.withdraw("waits")
    assert not outbound.withdraw("large")
    outbound.reported(cost(2 * WINDOW))
    assert outbound.next() == (1, "last")

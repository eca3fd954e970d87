"""Whether the next wait is expected to be short."""

from __future__ import annotations

import pytest

from rpc.transport.inline_read.promptness import Promptness


def foretold(waits: list[bool]) -> list[bool]:
    """What was expected before each wait."""
    promptness, expected = Promptness(), []
    for was_short in waits:
        expected.append(promptness.expected)
        promptness.note(was_short)
    return expected


@pytest.mark.parametrize("was_short", [True, False])
def test_what_was_so_ten_times_is_expected(was_short: bool) -> None:
    assert foretold([was_short] * 11)[-1] == was_short


def test_one_long_wait_among_short_ones_changes_nothing() -> None:
    assert all(foretold([True] * 5 + [False] + [True] * 5))


def test_two_long_waits_in_a_row_do() -> None:
    assert foretold([True] * 9 + [False] * 2 + [True])[-1] is False


def test_three_short_waits_make_up_for_many_long_ones() -> None:
    assert foretold([False] * 9 + [True] * 4)[9:] == [False] * 3 + [True]


def test_where_long_waits_are_as_many_as_short_ones_or_half_as_many_none_is_expected_to_be_short() -> None:
    for pattern in ([True, False], [True, True, False]):
        assert not any(foretold(pattern * 9)[len(pattern) * 3 :])

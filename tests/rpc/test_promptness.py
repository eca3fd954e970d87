"""Whether the next wait is expected to be short."""

from __future__ import annotations

from itertools import chain, repeat

import pytest

from rpc.transport.promptness import Promptness


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


@pytest.mark.parametrize("mostly", [True, False])
def test_one_wait_that_is_unlike_the_others_changes_nothing(mostly: bool) -> None:
    waits = [mostly] * 5 + [not mostly] + [mostly] * 5
    assert foretold(waits)[5:] == [mostly] * 6


@pytest.mark.parametrize("before", [True, False])
def test_two_in_a_row_do(before: bool) -> None:
    assert foretold([before] * 9 + [not before] * 2 + [before])[-1] != before


def test_two_of_three_are_enough() -> None:
    waits = list(chain.from_iterable(repeat([True, False, True], 5)))
    assert all(foretold(waits))

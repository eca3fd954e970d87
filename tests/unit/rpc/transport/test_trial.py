"""What does not pay is tried less and less often."""

from __future__ import annotations

import pytest

from rpc.transport.inline_read.trial import Trial


@pytest.fixture
def trial() -> Trial:
    return Trial()


def refusals(trial: Trial) -> int:
    count = 0
    while not trial.invites():
        count += 1
    return count


def test_what_was_of_no_use_is_left_alone_for_longer_each_time(trial: Trial) -> None:
    assert refusals(trial) == 0
    waits = []
    for _ in range(12):
        trial.was_in_vain()
        waits.append(refusals(trial))
    assert waits == [4, 8, 16, 32, 64, 128] + [256] * 6


def test_what_is_of_use_again_is_tried_more_often(trial: Trial) -> None:
    for _ in range(5):
        trial.was_in_vain()
    assert refusals(trial) == 64
    for _ in range(3):
        trial.was_of_use()
    trial.was_in_vain()
    assert refusals(trial) == 16
    for _ in range(10):
        trial.was_of_use()
    trial.was_in_vain()
    assert refusals(trial) == 4

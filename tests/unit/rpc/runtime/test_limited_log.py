from __future__ import annotations

import logging

import pytest

from rpc.runtime import limited_log
from rpc.runtime.limited_log import LimitedLog

logger = logging.getLogger("limited")


def test_after_a_burst_one_line_in_five_seconds_says_how_many_there_were(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(limited_log, "monotonic", lambda: now)
    log = LimitedLog(logger)
    for number in range(100):
        log.log(logging.WARNING, "refused %d", number)
    assert caplog.messages == [f"refused {number}" for number in range(20)]
    caplog.clear()
    now = 5.0
    for number in range(100, 200):
        log.log(logging.WARNING, "refused %d", number)
    assert caplog.messages == ["refused 100 (and 80 more like this)"]


def test_what_nobody_wants_to_see_costs_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog(logger)
    for number in range(100):
        log.log(logging.DEBUG, "looked in %d", number)
    log.log(logging.WARNING, "refused")
    assert caplog.messages == ["refused"]

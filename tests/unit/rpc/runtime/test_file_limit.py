"""The limit of open files is raised with the number of peers, where it would be too low."""

from __future__ import annotations

import logging
import resource

import pytest

from rpc.errors import RpcError
from rpc.runtime import file_limit
from rpc.runtime.file_limit import check, provide_for

UNLIMITED = resource.RLIM_INFINITY


class Limits:
    """The limits of a system, in place of this process's own."""

    def __init__(self, soft: int, hard: int) -> None:
        self.soft, self.hard = soft, hard

    def get(self, which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_NOFILE
        return self.soft, self.hard

    def set(self, which: int, limits: tuple[int, int]) -> None:
        assert which == resource.RLIMIT_NOFILE
        soft, hard = limits
        assert hard == self.hard
        assert soft > self.soft
        assert hard == UNLIMITED or soft <= hard
        self.soft = soft


@pytest.fixture
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Limits:
    made = Limits(*request.param)
    monkeypatch.setattr(resource, "getrlimit", made.get)
    monkeypatch.setattr(resource, "setrlimit", made.set)
    monkeypatch.setattr(file_limit, "_open_now", lambda: 0)
    file_limit._warn.cache_clear()
    return made


def grow(peers: int) -> None:
    """One peer after the other."""
    for number in range(1, peers + 1):
        provide_for(number)


@pytest.mark.parametrize("limits", [(1024, 4096), (1024, UNLIMITED), (UNLIMITED, UNLIMITED)], indirect=True)
def test_a_small_group_changes_nothing(limits: Limits) -> None:
    before = limits.soft
    grow(100)
    assert limits.soft == before


@pytest.mark.parametrize("limits", [(1024, 1 << 20), (1024, UNLIMITED), (64, 1 << 20)], indirect=True)
def test_a_large_group_gets_enough(limits: Limits, caplog: pytest.LogCaptureFixture) -> None:
    grow(1000)
    assert 6000 < limits.soft < 20_000
    assert not caplog.records


@pytest.mark.parametrize("limits", [(1024, 4096), (4096, 4096), (64, 4096)], indirect=True)
def test_what_the_system_does_not_permit_is_said_once(
    limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        grow(2000)
    assert limits.soft == 4096
    (record,) = caplog.records
    assert record.getMessage() == (
        "this process may open no more than 4096 files, and may need more for this number of other workers: "
        "raise the limit (ulimit -Hn)"
    )


@pytest.mark.parametrize("limits", [(1024, 4096)], indirect=True)
def test_files_that_are_open_already_count(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_limit, "_open_now", lambda: 1000)
    grow(1)
    assert limits.soft == 2048


@pytest.mark.parametrize("limits", [(64, 1024)], indirect=True)
def test_a_group_that_is_too_large_for_the_system_is_not_joined(limits: Limits) -> None:
    check(248)
    with pytest.raises(
        RpcError, match=r"249 others needs at least 1028 open files, better 1558, .* than 1024"
    ):
        check(249)


@pytest.mark.parametrize("limits", [(64, UNLIMITED)], indirect=True)
def test_a_system_without_a_limit_lets_any_group_be_joined(limits: Limits) -> None:
    check(1_000_000)

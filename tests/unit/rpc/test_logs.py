from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from rpc.errors import InvalidOptionError
from rpc.lifecycle.logs import show_log


@pytest.fixture
def loggers() -> Iterator[None]:
    """As they were, afterwards."""
    known = [
        logging.getLogger(name) for name in ("rpc", "rref", "dist_autograd", "dist_optim", "spmd", "farcall")
    ]
    before = [(each, each.level, each.handlers[:], each.propagate) for each in known]
    yield
    for each, level, handlers, propagate in before:
        each.level, each.handlers, each.propagate = level, handlers, propagate


@pytest.mark.usefixtures("loggers")
def test_a_line_has_the_workers_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARCALL_LOG", "debug")
    for name in ("earlier", "trainer0"):
        show_log(name)
    logging.getLogger("rpc.group.connections").debug("connected")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" trainer0 DEBUG connected")


@pytest.mark.usefixtures("loggers")
def test_nothing_is_touched_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARCALL_LOG", raising=False)
    show_log("trainer0")
    assert logging.getLogger("rpc").handlers == []
    monkeypatch.setenv("FARCALL_LOG", "loud")
    with pytest.raises(
        InvalidOptionError, match="FARCALL_LOG is one of debug, info, warning, error, not 'loud'"
    ):
        show_log("trainer0")

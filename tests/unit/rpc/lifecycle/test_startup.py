"""``init_rpc`` that is interrupted by a signal handler."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from types import BuiltinFunctionType
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import rpc
from rpc.lifecycle import own_backend, startup
from rpc.runtime.interrupts import protected
from tests.support.streams import until


def init() -> None:
    startup.init_with_store(None, HashStore(), "alone", 0, 1, rpc.AgentOptions())


def assert_nothing_is_left(before: set[threading.Thread]) -> None:
    assert not rpc.is_initialized()
    assert isinstance(_signal.signal, BuiltinFunctionType)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    until(lambda: before.issuperset(threading.enumerate()))


def test_protection_begins_before_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    @protected
    def open_store(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")

    before = set(threading.enumerate())
    monkeypatch.setattr(startup, "open_store", open_store)
    with pytest.raises(KeyboardInterrupt):
        init()
    assert done == ["all of it"]
    assert_nothing_is_left(before)


def test_an_agent_that_is_interrupted_when_it_is_made_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    make = own_backend._make

    def make_and_press(*arguments: Any) -> Any:
        made = make(*arguments)
        signal.raise_signal(signal.SIGINT)
        return made

    before = set(threading.enumerate())
    monkeypatch.setattr(own_backend, "_make", make_and_press)
    with pytest.raises(KeyboardInterrupt):
        init()
    assert_nothing_is_left(before)

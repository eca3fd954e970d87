"""Signals that end the commands which serve until they are told to end."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType, SimpleNamespace
from typing import Any

import click
import pytest

from farcall.serving import command
from farcall.weights import listening

SLEPT_SECONDS = 0.4
"""The command had slept when the signal came: it looks twice a second whether one has come."""

ENDING = (signal.SIGTERM, signal.SIGINT)


def run_serving() -> int:
    limits: Any = dict.fromkeys(("token_file", "cert", "key", "ca", "batch", "metrics_port"))
    addresses: Any = {"host": "127.0.0.1", "port": 0, "metrics_host": "127.0.0.1"}
    numbers: Any = {"delay": 0.0, "in_flight": 1, "queue": 1, "compressed": 1, "grace": 1.0}
    return command.run("a.py:f", insecure=False, tracebacks=False, **limits, **addresses, **numbers)


def run_weights() -> int:
    return listening.run("127.0.0.1:0", 2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("run", [run_serving, run_weights])
def test_command_ends_at_whichever_line_of_its_wait_the_signal_comes(
    monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    server = SimpleNamespace(port=1, metrics_port=None, address="", stop=lambda _: 0, close=lambda: None)
    monkeypatch.setattr(command, "load", lambda _: {})
    monkeypatch.setattr(command, "serve", lambda *_, **__: server)
    monkeypatch.setattr(listening, "Server", lambda *_: server)
    lines = 0  # that the wait runs before the signal comes
    came = False

    def send(_frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines, came
        if event == "line" and not came:
            lines -= 1
            if lines < 0:
                came = True
                os.kill(os.getpid(), signal.SIGTERM)
        return send

    def told(text: str) -> None:
        if "ending" not in text:  # it is about to wait
            sys._getframe(1).f_trace = send
            sys.settrace(send)
        else:
            sys.settrace(None)
            sys._getframe(1).f_trace = None

    monkeypatch.setattr(click, "echo", told)
    before = {each: signal.getsignal(each) for each in ENDING}
    try:
        for first in range(1000):
            lines, came = first, False
            began = time.monotonic()
            assert run() == 0
            sys.settrace(None)
            assert came
            if time.monotonic() - began > SLEPT_SECONDS:
                break
    finally:
        sys.settrace(None)
        for each, handler in before.items():
            signal.signal(each, handler)

"""How processes of one host get descriptors of segments."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from farcall.weights import memory
from farcall.weights.memory import DescriptorServer, Segment, fetch_descriptor
from rpc.bulk.shared_memory import fd_channel
from rpc.bulk.shared_memory.memory import SegmentRefused

pytestmark = pytest.mark.skipif(not memory.AVAILABLE, reason="processes cannot share memory here")


def accept_with(monkeypatch: pytest.MonkeyPatch, failure: Callable[[], int]) -> None:
    """Have ``accept`` fail with an error's number; 0: not at all."""

    def accept(listener: socket.socket) -> socket.socket | None:
        number = failure()
        if number:
            raise OSError(number, os.strerror(number))
        return fd_channel.accept(listener)

    monkeypatch.setattr(memory, "fd_channel", SimpleNamespace(**{**vars(fd_channel), "accept": accept}))


def test_a_server_without_descriptors_pauses_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()
    failures = []

    def failure() -> int:
        failures.append(errno.EMFILE)
        failed.set()
        return errno.EMFILE

    accept_with(monkeypatch, failure)
    monkeypatch.setattr(memory, "_PAUSE_SECONDS", 3600.0)
    server = DescriptorServer(lambda _: -1)
    assert failed.wait(60)
    server.close()
    assert failures == [errno.EMFILE]


def test_a_server_without_descriptors_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = Segment(1, 64)
    failures = [errno.EMFILE, errno.ENFILE]
    accept_with(monkeypatch, lambda: failures.pop() if failures else 0)

    def find(number: int) -> int:
        if number == 2:
            raise OSError(errno.EMFILE, "too many open files")
        return segment.duplicate() if number == 1 else -1

    server = DescriptorServer(find)
    try:
        name, token = cast("tuple[str, bytes]", server.address)
        os.close(fetch_descriptor(name, token, 1, 64))
        assert not failures
        with pytest.raises(BlockingIOError):
            fetch_descriptor(name, token, 2, 64)
        with pytest.raises(SegmentRefused, match="no segment 3"):
            fetch_descriptor(name, token, 3, 64)
    finally:
        server.close()
        segment.close()

"""Ports that are reserved for servers that a test starts later."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["reserved_port", "reserving_port"]


@contextmanager
def reserving_port() -> Iterator[int]:
    """A port of 127.0.0.1 that stays bound until the end of the block, so that the kernel assigns it to no
    other socket. Servers of the test may listen on it.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@pytest.fixture
def reserved_port() -> Iterator[int]:
    """A port that is reserved until the end of the test; see ``reserving_port``."""
    with reserving_port() as port:
        yield port

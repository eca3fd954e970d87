"""A port for a server that is started later, which nobody else gets meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["reserved_port", "reserving_port"]


@contextmanager
def reserving_port() -> Iterator[int]:
    """A port of 127.0.0.1 that is bound until the end: the kernel gives it to nobody who asks for any port;
    servers of the test may listen at it.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@pytest.fixture
def reserved_port() -> Iterator[int]:
    """The same, until the end of the test."""
    with reserving_port() as port:
        yield port

"""The processes that listen on ports of this host."""

from __future__ import annotations

import os
import socket

import pytest

from rpc.runtime.listening_processes import listening_processes
from tests.support.ports import reserved_port

__all__ = ["reserved_port"]


@pytest.mark.parametrize(
    ("family", "address"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")],
)
def test_process_that_listens_on_a_port_is_found(
    family: socket.AddressFamily, address: str, reserved_port: int
) -> None:
    with socket.create_server((address, reserved_port), family=family):
        assert listening_processes((reserved_port,)) == {reserved_port: os.getpid()}
        assert listening_processes()[reserved_port] == os.getpid()
    assert listening_processes((reserved_port,)) == {}

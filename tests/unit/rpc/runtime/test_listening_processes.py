"""The processes that listen on ports of this host."""

from __future__ import annotations

import os
import socket

import pytest

from rpc.runtime.listening_processes import listening_processes


@pytest.mark.parametrize(
    ("family", "address"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")],
)
def test_process_that_listens_on_a_port_is_found(family: socket.AddressFamily, address: str) -> None:
    with socket.create_server((address, 0), family=family) as server:
        port = server.getsockname()[1]
        assert listening_processes((port,)) == {port: os.getpid()}
        assert listening_processes()[port] == os.getpid()
    assert listening_processes((port,)) == {}

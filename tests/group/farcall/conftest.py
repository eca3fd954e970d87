"""Servers and clients that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import farcall
from farcall import client as clients
from farcall.client import Client
from farcall.serving import Server
from tests.support.gateway import Gate


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def begin(endpoints: dict[str, Any], **options: Any) -> Server:
        servers.append(farcall.serve(endpoints, **options))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop(0.0)


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def begin(server: Server, **options: Any) -> Client:
        made.append(clients.connect(f"localhost:{server.port}", **options))
        return made[-1]

    yield begin
    for each in made:
        each.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()

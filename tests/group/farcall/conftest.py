"""Servers, clients and weight stores that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import farcall
import rpc
from farcall import client as clients
from farcall.client import Client
from farcall.serving import Server
from farcall.weights import Store
from farcall.weights.listening import Server as StoreServer
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


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A weight store in a group of this process alone."""
    options = rpc.AgentOptions(init_method=f"file://{tmp_path}/meeting")
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    try:
        yield Store("policy", on="worker0", keep=2)
    finally:
        rpc.shutdown()


@pytest.fixture
def store_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    """A weight store for programs without a group."""
    monkeypatch.setenv("FARCALL_TOKEN", "a token of more than sixteen characters")
    started = StoreServer("127.0.0.1:0", keep=3)
    yield started
    started.close()

"""``rpc.serve`` is ``farcall.serve``."""

from __future__ import annotations

import farcall
import rpc
from farcall import client as clients
from tests.support.gateway import Scale


def test_it_serves() -> None:
    assert rpc.serve is farcall.serve
    with rpc.serve({"scale": Scale()}) as server, clients.connect(f"localhost:{server.port}") as client:
        assert float(client.call("scale", 1.0, timeout=60)) == 3.0

"""Over which backend groups of workers run: our own, or ``grpc`` where ``FARCALL_TEST_BACKEND`` says so."""

from __future__ import annotations

import os
from typing import Any, Final

import pytest

NAME: Final = os.environ.get("FARCALL_TEST_BACKEND", "")
"""``"grpc"``, or empty: the default."""

BETWEEN_HOSTS: Final = NAME or "tcp"
"""The transport of workers that are to behave as if they were on different hosts."""

PRELOADED: Final = ("farcall.grpc.transport",) if NAME == "grpc" else ()
"""What workers over that backend import."""

RECEIVERS_BYTES: Final = 24 << 20 if NAME == "grpc" else 0
"""What a receiver takes besides: gRPC's threads each keep as much as they had in hand at a time, 14 to 26 MiB
together when the first large tensor has come.
"""

over_sockets: Final = pytest.mark.skipif(NAME == "grpc", reason="it is about what is sent over a socket")
"""Marks tests that speak to a worker's socket themselves, or look at it."""

if NAME not in ("", "grpc"):
    raise ValueError(f"FARCALL_TEST_BACKEND is grpc or nothing, not {NAME!r}")


def use(options: dict[str, Any], name: str = NAME) -> dict[str, Any]:
    """Arguments of ``init_rpc`` for a worker with these options."""
    import rpc

    if name == "grpc":
        given = rpc.GrpcRpcBackendOptions(**options)
        return {"backend": rpc.BackendType.GRPC, "rpc_backend_options": given}
    return {"rpc_backend_options": rpc.AgentOptions(**options)}


def make_default(name: str = NAME) -> None:
    """Have all agents of this process that are told nothing else run over that backend."""
    if name != "grpc":
        return
    from rpc.transport import registry

    registry._BY_DEFAULT = ("grpc",)  # type: ignore[misc]
    registry._OURS["unix"] = registry._find("grpc")  # what an agent uses that is on one host with all others

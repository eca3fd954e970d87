"""This process's agent for one-sided transfers, beside any that the program has, and its transports.

Transports of one user on one host need no secret. On several hosts they need ``FARCALL_TOKEN``, as workers
do, and ``MASTER_ADDR``, by which each finds the address to listen at.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
from typing import Any, Protocol

import torch

import rpc  # noqa: F401  # whole, before its parts: several threads may import them at once
from rpc.agent.agent import Agent
from rpc.agent.futures import Future
from rpc.errors import RpcError
from rpc.group.workers import Member
from rpc.lifecycle.own_backend import admit, start_storeless_agent
from rpc.options import AgentOptions
from rpc.rendezvous.address import listen_address

__all__ = ["Endpoint", "TransferNode", "enter", "leave"]

_GROUP = "farcall one-sided"


class Endpoint(Protocol):
    """A transport, as its peer's requests see it."""

    def put(self, region: int, data: torch.Tensor) -> None: ...

    def get(self, region: int, length: int) -> torch.Tensor: ...


class TransferNode:
    """The agent, and the transports of this process by name. From any thread."""

    def __init__(self) -> None:
        self.endpoints: dict[str, Endpoint] = {}
        host, _ = listen_address(os.environ.get("MASTER_ADDR"))
        options = AgentOptions(listen=f"[{host}]" if ":" in host else host)
        self._agent: Agent = start_storeless_agent(f"one-sided-{secrets.token_hex(8)}", _GROUP, options)
        atexit.register(self._close)

    @property
    def me(self) -> list[Any]:
        """What other processes need to reach this one."""
        return self._agent.group.peers.view.me.to_wire()

    def meet(self, other: list[Any]) -> str:
        """Make the process known that ``me`` describes; returns its worker's name."""
        member = Member.from_wire(other)
        if (
            member.incarnation != self._agent.incarnation
            and self._agent.group.peers.view.find(member.incarnation) is None
        ):
            admit(self._agent, member)
        return member.name

    def put(self, worker: str, endpoint: str, region: int, data: torch.Tensor) -> Future[None]:
        """Begin to write the first bytes of a region of a peer."""
        return self._agent.call_async(worker, _put, (endpoint, region, data), {}, 0.0)

    def get(self, worker: str, endpoint: str, region: int, length: int) -> Future[torch.Tensor]:
        """Begin to read the first bytes of a region of a peer."""
        return self._agent.call_async(worker, _get, (endpoint, region, length), {}, 0.0)

    def close(self) -> None:
        """End the agent."""
        atexit.unregister(self._close)
        self._close()

    def _close(self) -> None:
        self._agent.close("it has closed its transports")


_lock = threading.RLock()  # a finalizer that runs while it is held may close a transport
_node: TransferNode | None = None


def enter(name: str, endpoint: Endpoint) -> TransferNode:
    """Make a transport known to this process's node, which the first of them starts."""
    global _node
    with _lock:
        if _node is None:
            _node = TransferNode()
        _node.endpoints[name] = endpoint
        return _node


def leave(name: str) -> None:
    """Forget a transport. The last of them ends the node."""
    global _node
    with _lock:
        if _node is None or _node.endpoints.pop(name, None) is None or _node.endpoints:
            return
        ended, _node = _node, None
    ended.close()


def _find(endpoint: str) -> Endpoint:
    current = _node
    found = None if current is None else current.endpoints.get(endpoint)
    if found is None:
        raise RpcError(f"the peer's transport {endpoint} is closed")
    return found


def _put(endpoint: str, region: int, data: torch.Tensor) -> None:
    _find(endpoint).put(region, data)


def _get(endpoint: str, region: int, length: int) -> torch.Tensor:
    return _find(endpoint).get(region, length)

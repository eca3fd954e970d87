"""A store for programs without a group: the command ``farcall weights``, and ``connect``.

The command's process has an agent at the address, in a group without a store of its own, and safe mode, in
which no pickles are read. Its incarnation is a constant, so that a client can connect that knows the address
only. The client's first, short-lived agent asks who is there, so that the second one knows the server as it
is.
"""

from __future__ import annotations

import hashlib
import secrets
import signal
from dataclasses import replace
from typing import Final

import click

import rpc  # noqa: F401  # whole, before its parts: several threads may import them at once
from farcall.weights.errors import WeightsError
from farcall.weights.keeper import Keeper
from farcall.weights.node import node_of, worker_at
from farcall.weights.store import Store
from rpc.agent.agent import Agent
from rpc.errors import InvalidOptionError, RpcTimeoutError, WorkerLostError
from rpc.group.workers import Member, WorkerInfo
from rpc.lifecycle.own_backend import admit, start_storeless_agent
from rpc.options import AgentOptions, parse_listen
from rpc.rendezvous.address import listen_address
from rpc.runtime.blocking import event_of_signals, wait_for_event

__all__ = ["Server", "connect", "run"]

_GROUP: Final = "farcall weights"
_NAME: Final = "weights"
_INCARNATION: Final = int.from_bytes(hashlib.sha256(_GROUP.encode()).digest()[:6])


class Server:
    """Keeps one store for programs without a group.

    Args:
        listen: ``HOST:PORT``; port 0: a free one.
        keep: number of whole versions that stay.

    Attributes:
        address: where it listens.
    """

    def __init__(self, listen: str, keep: int) -> None:
        host, _ = parse_listen(listen)
        options = AgentOptions(listen=listen, deserialization="safe")
        self._agent = start_storeless_agent(_NAME, _GROUP, options, _INCARNATION)
        tcp = next(each for each in self._agent.addresses if each.startswith("tcp:"))
        self.address = f"{f'[{host}]' if ':' in host else host}:{tcp.rpartition(':')[2]}"
        node_of(self._agent).store(_NAME, _NAME, lambda: Keeper(_NAME, self._agent)).describe(keep)

    def close(self) -> None:
        """End; readers keep what they have."""
        self._agent.close("its command has ended")


def run(listen: str, keep: int) -> int:
    """Keep a store until SIGTERM or SIGINT; returns the exit status.

    Raises:
        RpcError: an option is wrong.
        OSError: it cannot listen there.
    """
    asked = event_of_signals(signal.SIGTERM, signal.SIGINT)
    server = Server(listen, keep)
    click.echo(f"keeping the newest {keep} versions of weights at {server.address}")
    wait_for_event(asked)
    server.close()
    return 0


def connect(address: str, timeout: float = 30.0) -> Store:
    """Open the store of ``farcall weights --listen``, in a program that need not be a worker of any group.

    The token comes from ``FARCALL_TOKEN`` or ``FARCALL_TOKEN_FILE``, as for workers; on one host, a user's
    programs need none. Processes on the server's host share memory with it.

    Args:
        address: ``HOST:PORT`` that the command has printed.
        timeout: how long to try to connect, in seconds.

    Returns:
        A store; its ``close()`` ends the connection.

    Raises:
        WeightsError: nothing answers there, or it refuses this program, which may have another token.

    Example::

        store = weights.connect("10.0.0.5:29600")
        version = store.get(model.state_dict())
    """
    try:
        host, port = parse_listen(address)
    except InvalidOptionError as error:
        raise WeightsError(f"the address of a weight store is HOST:PORT: {error}") from None
    if not port:
        raise WeightsError(f"the address of a weight store is HOST:PORT, not {address!r}")
    given = f"tcp:{f'[{host}]' if ':' in host else host}:{port}"
    stranger = Member(WorkerInfo(_NAME, 0), _INCARNATION, "", (given,))
    asking = _agent(host)
    try:
        admit(asking, stranger)
        server = Member.from_wire(asking.call(_NAME, worker_at, (_INCARNATION,), {}, timeout))
    except (WorkerLostError, RpcTimeoutError) as error:
        reason = getattr(error, "reason", "") or f"it has not answered within {timeout:g} s"
        raise WeightsError(
            f"cannot open the weight store at {address}: {reason}. Check that `farcall weights` listens "
            "there, with the same FARCALL_TOKEN."
        ) from error
    finally:
        asking.close("it has learned who is there")
    try:
        return _opened(host, server)
    except WorkerLostError:  # it is reached under another address than its own
        return _opened(host, replace(server, addresses=(given,)))


def _opened(host: str, server: Member) -> Store:
    agent = _agent(host)
    try:
        admit(agent, server)
        return Store.of_agent(_NAME, _NAME, agent)
    except BaseException:
        agent.close("it could not open the store")
        raise


def _agent(host: str) -> Agent:
    own, _ = listen_address(host)
    options = AgentOptions(listen=own, deserialization="safe")
    return start_storeless_agent(f"reader-{secrets.token_hex(8)}", _GROUP, options)

"""The agent under process groups: that of ``init_rpc`` if all ranks have one, otherwise one that is started
for them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, Final, Protocol, Self, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore, default_pg_timeout  # type: ignore[attr-defined]

from rpc.agent.agent import Agent
from rpc.agent.lifecycle import Lifecycle
from rpc.bulk.point_to_point import Bulk
from rpc.errors import GroupMismatchError, NotInitializedError, RendezvousTimeoutError, RpcError
from rpc.group.peer import Peer
from rpc.lifecycle.own_backend import start_separate_agent
from rpc.options import AgentOptions
from rpc.rendezvous.store import SharedStore, StoreWait, run_with_deadline
from rpc.rendezvous.token import WAYS, find_credential
from rpc.runtime.blocking import check_may_block
from rpc.runtime.current import current_agent
from rpc.runtime.tasks import Task
from rpc.transport.authentication import ForeignRecordError, Seal
from spmd.collectives.errors import StoreGivenUpError
from spmd.collectives.flight_recorder import FlightRecorder

__all__ = ["Node", "WatchesWorkers", "agent_of_rpc", "exchanged", "find_node", "master_of"]

T = TypeVar("T")

_NONE: Final = "-"
_LOOK_SECONDS: Final = 2.0
_PART_SECONDS: Final = 0.5
_EXTENSION: Final = "spmd.node"
_RECORDER: Final = "spmd.collectives"


class WatchesWorkers(Protocol):
    """Notified when a worker is gone, and observed."""

    def observed(self) -> dict[str, Any]: ...

    def worker_gone(self, peer: Peer, reason: str) -> None: ...

    def agent_closes(self) -> None: ...


class Node:
    """What an agent does for process groups, and the worker of each rank of the world.

    Args:
        lifecycle: lifecycle of an agent that has joined its group.
        extensions: extensions of the agent; observers find the node there.
        bulk: its bulk messages.
        run_soon: runs tasks on its executor threads.
        shares_memory: whether it uses shared memory.
        peers: the workers, by rank.
        key: key of this world, the same on all its ranks, and different from that of any other.
        owned: whether the agent was started for process groups, and ends with the last of them.

    Attributes:
        recorder: flight recorder of all its groups' operations.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        extensions: dict[str, Any],
        bulk: Bulk,
        run_soon: Callable[[Sequence[Task]], object],
        peers: Sequence[Peer],
        key: str,
        *,
        shares_memory: bool,
        owned: bool,
    ) -> None:
        self.bulk = bulk
        self.run_soon = run_soon
        self.shares_memory = shares_memory
        self.peers = peers
        self.key = key
        self.recorder = FlightRecorder()
        self._lifecycle = lifecycle
        self._owned = owned
        self._groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.RLock()  # a finalizer that runs while it is held may end a group
        self._process = os.getpid()
        self._hooks: list[tuple[list[Any], Any]] = [
            (lifecycle.hooks.gone, self._worker_gone),
            (lifecycle.hooks.close, self._agent_closes),
        ]
        for handlers, mine in self._hooks:
            handlers.append(mine)
        self._extensions = extensions
        extensions[_EXTENSION], extensions[_RECORDER] = self, self.recorder
        if owned:
            atexit.register(self.close)
            _owned.add(self)
            _notice_forks()

    @classmethod
    def of(cls, agent: Agent, peers: Sequence[Peer], key: str, *, owned: bool) -> Self:
        """Return the node of an agent; arguments as for ``Node``."""
        return cls(
            agent.lifecycle,
            agent.extensions,
            agent.messages.bulk,
            agent.executor.submit_batch,
            peers,
            key,
            shares_memory=agent.options.shared_memory_bytes > 0,
            owned=owned,
        )

    def observed(self) -> list[dict[str, Any]]:
        """State for observers: for each group the last collective that this rank has begun."""
        return [group.observed() for group in list(self._groups)]

    def add(self, group: WatchesWorkers) -> None:
        """Notify ``group`` from now on when workers are gone, also of those that already are."""
        with self._lock:
            self._groups.add(group)
        for peer in self.peers:
            if peer.lost is not None:
                group.worker_gone(peer, peer.lost)

    def remove(self, group: WatchesWorkers) -> None:
        """Remove a group that has ended; an agent that was started for groups ends with the last one."""
        with self._lock:
            self._groups.discard(group)
        self.close_if_unused()

    def close_if_unused(self) -> None:
        """If there are no groups, stop watching the workers, and end an agent that was started for groups."""
        with self._lock:
            is_used = bool(self._groups)
        if is_used:
            return
        for handlers, mine in self._hooks:
            with contextlib.suppress(ValueError):
                handlers.remove(mine)
        if self._extensions.get(_EXTENSION) is self:
            del self._extensions[_EXTENSION], self._extensions[_RECORDER]
        if self._owned:
            self.close()

    def _worker_gone(self, peer: Peer, reason: str) -> None:
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            group.worker_gone(peer, reason)

    def _agent_closes(self) -> None:
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            group.agent_closes()

    def close(self) -> None:
        """End an agent that was started here, in the process that has started it."""
        if os.getpid() == self._process and not self._lifecycle.closed:
            atexit.unregister(self.close)
            self._lifecycle.close("it has left the process group")

    def abandon_after_fork(self) -> bool:
        """Abandon the parent's agent, in a forked child; false if it has ended there."""
        if self._lifecycle.closed:
            return False
        self._lifecycle.abandon_after_fork()
        return True


_owned: weakref.WeakSet[Node] = weakref.WeakSet()
"""Nodes whose agents ``rpc`` does not know when this process is forked."""


def _forked() -> None:
    _inherited.extend(node for node in list(_owned) if node.abandon_after_fork())
    _owned.clear()


_inherited: list[Node] = []
"""Agents of the parent: destroying their loops here would affect what it still uses."""


@functools.cache
def _notice_forks() -> None:
    os.register_at_fork(after_in_child=_forked)


def find_node(store: Store, rank: int, size: int, timeout: float, options: AgentOptions | None) -> Node:
    """Return the node of a new world of ranks.

    Args:
        store: store under a prefix of this group; all ranks call this at the same time.
        rank, size: rank of this process in the group, and number of ranks.
        timeout: maximum time in seconds to wait for all; 0: c10d's default.
        options: options of an agent; if given, one is started.

    Raises:
        RendezvousTimeoutError: not all ranks have come; names the missing ones.
        GroupMismatchError: a rank has another token.
    """
    timeout = timeout or default_pg_timeout.total_seconds()
    turn = run_with_deadline(lambda _: store.add(f"turn/{rank}", 1), timeout, "the process group's store")
    store = PrefixStore(f"{turn}", store)
    mine = None if options is not None else agent_of_rpc()
    given = (options or AgentOptions()) if mine is None else mine.options
    seal = Seal(find_credential(given, os.environ).token)

    def tell(what: str, text: str) -> list[str]:
        def read(other: int, sealed: bytes) -> str:
            return _opened(seal, f"{what}/{other}", sealed, rank)

        return exchanged(store, what, seal.close(f"{what}/{rank}", text.encode()), rank, size, timeout, read)

    said = tell("agent", _NONE if mine is None else _identity(mine))
    peers = None if mine is None else _peers_of(mine, said)
    agreed = tell("agreed", _NONE if peers is None else secrets.token_hex(8))
    if mine is not None and peers is not None and _NONE not in agreed:
        return Node.of(mine, peers, agreed[0], owned=False)
    options = options or AgentOptions()
    options.rendezvous_timeout = timeout
    shared = SharedStore(None, PrefixStore("agents", store), "the process group's store", master_of(store))
    agent = start_separate_agent(shared, f"rank{rank}", rank, size, options)
    return Node.of(agent, [agent.group.peers.find(other) for other in range(size)], agreed[0], owned=True)


def agent_of_rpc() -> Agent | None:
    """Return the agent of ``init_rpc``; None if there is none, or it is of another backend."""
    try:
        agent = current_agent()
    except NotInitializedError:
        return None
    return agent if isinstance(agent, Agent) else None


def _identity(agent: Agent) -> str:
    return f"{agent.info.id}:{agent.incarnation}"


def _peers_of(agent: Agent, said: Sequence[str]) -> list[Peer] | None:
    """Return the workers that all ranks have named; None if not all are workers of this agent's group."""
    peers = []
    for each in said:
        if each == _NONE:
            return None
        worker, _, incarnation = each.partition(":")
        try:
            peer = agent.group.peers.find(int(worker))
        except RpcError:
            return None
        if peer.incarnation != int(incarnation):
            return None
        peers.append(peer)
    return peers


def _opened(seal: Seal, name: str, sealed: bytes, rank: int) -> str:
    try:
        return seal.open(name, sealed).decode()
    except ForeignRecordError as error:
        raise GroupMismatchError(
            f"rank {name.rpartition('/')[2]} of the process group has another token than rank {rank}. {WAYS}"
        ) from error


def exchanged(
    store: Store,
    what: str,
    mine: bytes,
    rank: int,
    size: int,
    timeout: float,
    read: Callable[[int, bytes], T],
) -> list[T]:
    """Publish a message of this rank, once; returns what all ranks have said, by rank.

    Args:
        store: of the ranks. One that is written in Python needs ``wait`` with a timeout, and ``check``.
        what: name of the messages, which only this exchange uses.
        mine: this rank's message.
        rank, size: of this rank, and the number of ranks; all call this.
        timeout: maximum time in seconds to wait for the other ranks.
        read: takes a rank and its message, and returns what it has said; called in the order of the ranks,
            as soon as each message is there. What it raises ends the exchange.

    Raises:
        BlockingCallError: called inside an ``async def`` callee.
        RendezvousTimeoutError: not all ranks have come in time; names the missing ones.
        StoreGivenUpError: forming the group was given up.
    """
    check_may_block()
    waiting_for = f"the process group's store (the {what} of all ranks)"
    names = [f"{what}/{other}" for other in range(size)]

    def ask(waiting: StoreWait) -> list[T]:
        store.set(names[rank], mine)  # type: ignore[arg-type]
        said = []
        for other, name in enumerate(names):
            _wait_for_key(store, name, waiting)
            said.append(read(other, store.get(name)))
        return said

    def look(_: object) -> list[str]:
        return [str(other) for other, name in enumerate(names) if not store.check([name])]

    began = monotonic()
    try:
        return run_with_deadline(ask, timeout, waiting_for)
    except (StoreGivenUpError, GroupMismatchError):
        raise
    except RuntimeError as error:
        if monotonic() - began < timeout:
            raise  # it is not a timeout: the store gives the reason
        missing = run_with_deadline(look, _LOOK_SECONDS, waiting_for)
        if not missing:
            raise
        raise RendezvousTimeoutError(
            f"rank {rank} has waited {timeout:g} s for the other ranks of a process group of "
            f"{size}; missing: {', '.join(missing)}. Check that they run, and form the same group."
        ) from error


def _wait_for_key(store: Store, key: str, waiting: StoreWait) -> None:
    """Wait for a key, in parts: nothing else ends the wait of a caller that was interrupted."""
    while True:
        until = monotonic() + min(waiting.remaining, _PART_SECONDS)
        try:
            # c10d drops fractions of milliseconds, and 0 is no limit.
            store.wait([key], timedelta(milliseconds=int((until - monotonic()) * 1000) + 1))
            return
        except RuntimeError:
            if monotonic() < until or not waiting.pause(0):
                raise


def master_of(store: Store) -> str | None:
    """Return the host that serves a store; None if the store has no such host."""
    for each in _layers(store):
        if isinstance(each, TCPStore):
            return str(each.host)
    return os.environ.get("MASTER_ADDR")


def _layers(store: Store) -> Iterator[Store]:
    yield store
    with contextlib.suppress(AttributeError):
        while True:
            store = store.underlying_store  # type: ignore[attr-defined]
            yield store

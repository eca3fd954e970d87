"""Workers that form groups by handles: texts that name an incarnation, which programs exchange themselves."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from rpc.errors import GroupMismatchError, WorkerLostError
from rpc.lifecycle.own_backend import start_separate_agent
from rpc.options import AgentOptions
from rpc.rendezvous.store import SharedStore
from spmd.collectives.errors import CollectiveError, CollectiveTimeoutError
from spmd.collectives.node import Node, agent_of_rpc, master_of

__all__ = ["Workers"]

_PREFIX: Final = "farcall:"
_LOOK_SECONDS: Final = 0.02


class Workers:
    """The workers that this one can form groups with: those of its RPC group, or of a group at the store.

    Args:
        store: where an agent joins a dynamic group if this process has none. It waits for no other worker.
        rank: rank of this process, for the agent's name.
        timeout: time in seconds to join.
        options: options of an agent; if given, one is started.
    """

    def __init__(self, store: Store, rank: int, timeout: float, options: AgentOptions | None) -> None:
        agent: Any = None if options is not None else agent_of_rpc()
        is_owned = agent is None
        if agent is None:
            options = options or AgentOptions()
            options.rendezvous_timeout, options.dynamic = timeout, True
            shared = SharedStore(
                None, PrefixStore("agents", store), "the process group's store", master_of(store)
            )
            agent = start_separate_agent(shared, f"rank{rank}-{secrets.token_hex(4)}", -1, None, options)
        self._agent = agent
        # It keeps an agent that was started here, until it is closed.
        self._anchor = Node.of(agent, [agent.group.peers.own], secrets.token_hex(8), owned=is_owned)

    @property
    def handle(self) -> str:
        """This worker's handle."""
        own = self._agent.group.peers.own
        return f"{_PREFIX}{own.name}/{own.incarnation:x}"

    def node(self, handles: Sequence[str], key: str, timeout: float) -> Node:
        """Return the node of a world of workers.

        Args:
            handles: their handles, by rank.
            key: the same at all of them, and different from that of any other world.
            timeout: time in seconds to wait for workers that have not joined yet; 0 for no limit.

        Raises:
            ValueError: a text is no handle.
            WorkerLostError: a worker is lost.
            CollectiveTimeoutError: a worker has not joined.
        """
        deadline = monotonic() + (timeout or float("inf"))
        peers = [self._find(each, deadline) for each in handles]
        return Node.of(self._agent, peers, key, owned=False)

    def _find(self, handle: str, deadline: float) -> Any:
        name, _, number = handle.removeprefix(_PREFIX).rpartition("/")
        try:
            incarnation = int(number, 16) if handle.startswith(_PREFIX) and name else -1
        except ValueError:
            incarnation = -1
        if incarnation < 0:
            raise ValueError(f"{handle!r} is not a handle of the backend farcall: see get_reconfigure_handle")
        while (peer := self._agent.group.peers.by_incarnation(incarnation)) is None:
            if self._agent.is_static_group:
                raise GroupMismatchError(
                    f"worker '{name}' is not in the static RPC group of worker "
                    f"'{self._agent.group.peers.own.name}': all workers of a process group need one RPC group"
                )
            if self._agent.lifecycle.closed:
                raise CollectiveError("this worker's agent has ended")
            if monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"worker '{name}' has not joined the group of worker "
                    f"'{self._agent.group.peers.own.name}' in time, or is lost"
                )
            time.sleep(_LOOK_SECONDS)
        if peer.lost is not None:
            raise WorkerLostError(f"worker '{name}' is lost: {peer.lost}", name)
        return peer

    def close(self) -> None:
        """End the agent, if it was started for this."""
        self._anchor.close_if_unused()

"""The stores that an agent keeps, its copies of others' stores, and its waits: how other workers ask them.

A store is found once by the name of the worker on which it was made, and its own name. After that, it and
each copy of it are asked by their *id*, a random number.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from farcall.weights.errors import WeightsError
from rpc.agent.agent import Agent
from rpc.errors import RpcError
from rpc.functions import async_execution
from rpc.runtime.current import current_agent
from rpc.serialization.settings import allow_function

__all__ = ["Node", "ask", "call_kept", "current_node", "done", "new_id", "node_at", "node_of", "worker_at"]

_MOST_SHOWN: Final = 64
"""Maximum number of stores in a worker's state file."""


class Node:
    """What one agent has to do with stores; one of its extensions. From any thread.

    Attributes:
        stores: the stores that are kept here, by the worker on which they were made, and their names.
        kept: these and the copies of others, by id.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.lock = threading.RLock()  # a finalizer that runs while it is held may use a store
        self.stores: dict[tuple[str, str], Any] = {}
        self.kept: dict[int, Any] = {}
        self._copies: dict[int, tuple[int, Callable[[int], Any]]] = {}
        """For the id of each store whose copy can be kept here, the copy's id, and what makes it."""
        self._waits: dict[int, Callable[[], object]] = {}
        self._leaves = False
        hooks = agent.lifecycle.hooks
        hooks.leaving.append(self._leave)
        hooks.closed.append(self._close)
        hooks.forked.append(self._abandon)

    def store(self, home: str, name: str, make: Callable[[], Any]) -> Any:
        """Return a store that is kept here; the first call makes it."""
        with self.lock:
            if (home, name) not in self.stores:
                self.add(home, make())
            return self.stores[home, name]

    def add(self, home: str, kept: Any) -> None:
        """Keep a store from now on, which was made on the worker ``home``."""
        with self.lock:
            self.kept[kept.id] = self.stores[home, kept.name] = kept

    def can_keep(self, store_id: int, make: Callable[[int], Any]) -> int:
        """Let others ask the copy of a store, which is made for the first one that does; returns its id."""
        with self.lock:
            if store_id not in self._copies:
                self._copies[store_id] = new_id(), make
            return self._copies[store_id][0]

    def end_copy(self, store_id: int) -> None:
        """Keep the copy of a store no longer, unless it is a store itself by now."""
        with self.lock:
            copy_id, _ = self._copies.pop(store_id, (0, None))
            copy = self.kept.get(copy_id)
            if copy is None or copy in self.stores.values():
                return
            del self.kept[copy_id]
        copy.close()

    def find(self, kept_id: int) -> Any:
        """Return a store or a copy; None if it is not here."""
        with self.lock:
            if kept_id not in self.kept:
                make = next((make for each, make in self._copies.values() if each == kept_id), None)
                if make is None:
                    return None
                self.kept[kept_id] = make(kept_id)
            return self.kept[kept_id]

    def observed(self) -> list[dict[str, Any]]:
        """Return what each store and copy shows."""
        return [each.observed() for each in list(self.kept.values())[:_MOST_SHOWN]]

    # ---- this agent's own waits

    @contextlib.contextmanager
    def waiting(self, name: str, end: Callable[[], object]) -> Iterator[None]:
        """Wait inside the block; ``end`` is called when a graceful shutdown begins, which waits for calls."""
        key = secrets.randbits(53)
        with self.lock:
            if self._leaves or self.agent.lifecycle.departure.begun:
                raise RpcError(f"this worker is shutting down: it waits for store '{name}' no more")
            self._waits[key] = end
        try:
            yield
        finally:
            self._waits.pop(key, None)

    def _leave(self) -> None:
        with self.lock:
            self._leaves = True
            waits = list(self._waits.values())
        for end in waits:
            end()

    def _close(self) -> None:
        for each in self._take():
            each.close()

    def _abandon(self) -> None:
        for each in self._take():
            each.abandon()
        _nodes.clear()

    def _take(self) -> list[Any]:
        """Return what is kept, and forget it."""
        _nodes.pop(self.agent.incarnation, None)
        kept = list(self.kept.values())
        self.stores, self.kept, self._copies = {}, {}, {}
        return kept


_lock: Final = threading.Lock()
_nodes: Final[dict[int, Node]] = {}
"""Those of the agents of this process, by incarnation."""


def node_of(agent: Agent) -> Node:
    """Return an agent's node; the first call makes it."""
    with _lock:
        found: Node | None = agent.extensions.get("weights")
        if found is None:
            found = agent.extensions["weights"] = _nodes[agent.incarnation] = Node(agent)
        return found


def current_node() -> Node:
    """Return the node of the current agent.

    Raises:
        WeightsError: it is another backend's.
    """
    agent = current_agent()
    if not isinstance(agent, Agent):
        raise WeightsError("a store needs an agent of farcall's own backends")
    return node_of(agent)


def node_at(incarnation: int) -> Node | None:
    """Return the node of an agent of this process; None if there is none."""
    return _nodes.get(incarnation)


def new_id() -> int:
    """Return a number for a store, a copy or a lease, which no other one has."""
    return secrets.randbits(53)


def done(value: Any = None) -> torch.futures.Future[Any]:
    """Return a completed future."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def call_kept(agent: Agent, worker: str, incarnation: int, kept_id: int, name: str, *call: Any) -> Any:
    """Call a method of a store or a copy that another worker keeps; returns a future. ``call``: the method,
    and its arguments.
    """
    what, *args = call
    return agent.call_async(worker, ask, (incarnation, kept_id, name, what, args), {}, 0.0)


@allow_function
@async_execution
def ask(incarnation: int, kept_id: int, name: str, what: str, args: list[Any]) -> torch.futures.Future[Any]:
    """Called at the agent with this incarnation: a method of a store or a copy that it keeps."""
    node = _nodes.get(incarnation)
    kept = None if node is None else node.find(kept_id)
    if kept is None:
        again = any(name == each for node in list(_nodes.values()) for _, each in list(node.stores))
        raise WeightsError(
            f"store '{name}' was started again since, and its versions are gone: open it again"
            if again
            else f"store '{name}' is not here"
        )
    if what not in kept.asked:
        raise WeightsError(f"store '{name}' has no {what!r:.40}")
    answer = getattr(kept, what)(*args)
    return answer if isinstance(answer, torch.futures.Future) else done(answer)


@allow_function
def worker_at(incarnation: int) -> list[Any]:
    """Called at the agent with this incarnation: return the description of its worker."""
    node = node_at(incarnation)
    if node is None:
        raise WeightsError("no weight store listens here")
    return node.agent.group.peers.view.me.to_wire()

"""How a store goes on when its worker is lost, and how others find it.

When a worker has lost the one that keeps a store, it asks all workers of the group. The one with the second
copy (``copies.py``) checks that it has lost the keeper as well, and then keeps the store itself: the copy's
versions get their numbers, and later ones come after all that there were. A store keeps its name and the name
of the worker where it was made, by which a worker that joins later, or the restarted one, finds it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any, Final

from farcall.weights.copies import Copy
from farcall.weights.errors import WeightsError
from farcall.weights.handle import Handle, called_at
from farcall.weights.keeper import Keeper
from farcall.weights.node import Node, current_node, node_at
from rpc.agent.agent import Agent
from rpc.errors import RpcError
from rpc.serialization.settings import allow_function

__all__ = ["open_again", "open_store"]

logger = logging.getLogger(__name__)

_ALIVE: Final = -1
"""Rank of a worker that still reaches the store where it is."""

_TAKEN_OVER: Final = 1 << 62
"""Rank of a worker that keeps the store already."""

_ROUNDS: Final = 3
"""How often all workers are asked while one of them still reaches the store."""

_taking_over: Final = threading.Lock()


def _copies_of(node: Node, home: str, name: str) -> list[Copy]:
    """Return the second copies of a store that an agent has: one for each keeper that it has had."""
    return [
        each
        for each in list(node.kept.values())
        if isinstance(each, Copy)
        if (each.source_store.home, each.name) == (home, name) and each.newest is not None
    ]


@allow_function
def rank(home: str, name: str) -> int:
    """Called at all workers: return how recent the copy here is if the store's worker is lost: one more than
    the serial of its newest version. 0 if there is none here; -1 if this worker still reaches the store.
    """
    node = current_node()
    ranks = [
        _ALIVE if each.source_store.is_there() else 1 + (each.newest or 0)
        for each in _copies_of(node, home, name)
    ]
    if isinstance(node.stores.get((home, name)), Copy):  # by now
        return _TAKEN_OVER
    return _ALIVE if _ALIVE in ranks else max(ranks, default=0)


@allow_function
def take_over(home: str, name: str) -> None:
    """Called at the worker that keeps a store from now on."""
    node = current_node()
    with _taking_over:
        if isinstance(node.stores.get((home, name)), Copy):
            return
        copy = max(_copies_of(node, home, name), key=lambda each: each.newest or 0, default=None)
        if copy is None:
            raise WeightsError(f"this process has no copy of store '{name}' any more")
        copy.take_over()
    logger.warning(
        "worker '%s' keeps store '%s' from now on, as worker '%s', which kept it, is lost. It has versions "
        "%s; parts of others have to be put again",
        node.agent.info.name,
        name,
        home,
        copy.versions(),
    )


def find(agent: Agent, home: str, name: str) -> str | None:
    """Return the worker that keeps a store whose worker is lost, by name; None if there is none, or if the
    worker is lost to this one only. It is asked to take the store over if it has not done so yet.
    """
    for _ in range(_ROUNDS):  # another worker may be taking it over, which some have seen, and some have not
        ranks = _ranks(agent, home, name)
        taken_over = [worker for worker, found in ranks.items() if found == _TAKEN_OVER]
        if taken_over:
            return taken_over[0]
        if _ALIVE not in ranks.values():
            break
    else:
        return None
    for worker in sorted(ranks, key=lambda each: ranks[each], reverse=True):
        if ranks[worker] > 0:
            with contextlib.suppress(RpcError):  # it is lost by now
                agent.call(worker, take_over, (home, name), {}, 0.0)
                return worker
    return None


def _ranks(agent: Agent, home: str, name: str) -> dict[str, int]:
    """Ask all workers; those that are lost, or cannot keep stores, are left out."""
    asked = {}
    for member in agent.group.peers.view.present():
        with contextlib.suppress(RpcError):
            asked[member.name] = agent.call_async(member.name, rank, (home, name), {}, 0.0)
    ranks: dict[str, int] = {}
    for worker, future in asked.items():
        with contextlib.suppress(RpcError):
            ranks[worker] = future.wait()
    return ranks


@allow_function
def opened(incarnation: int, home: str, name: str, keep: int | None, copies: int) -> list[Any] | str:
    """Called at the agent with this incarnation: open a store. It is made on its first worker, unless it has
    two copies, and another worker has taken it over: the answer is that one's name then.
    """
    node = node_at(incarnation)
    store = None if node is None else node.stores.get((home, name))
    if store is None:
        node = current_node()
        agent = node.agent
        if (agent.incarnation, agent.info.name) != (incarnation, home):
            raise WeightsError(f"store '{name}' is not here")
        successor = find(agent, home, name) if copies > 1 else None
        if successor is not None:
            return successor
        store = node.store(home, name, lambda: Keeper(name, agent))
    found: list[Any] = store.describe(keep, copies)
    return found


def open_store(
    agent: Agent,
    name: str,
    on: str,
    keep: int | None = None,
    copies: int = 1,
    home: str | None = None,
) -> Handle:
    """Return a handle of a store; see ``Store``. ``home``: the worker that ``on`` has taken it over from, if
    it has.
    """
    home = on if home is None else home
    while True:
        called = agent.group.peers.find(on).incarnation, home, name, keep, copies
        answer = called_at(agent, on, name, opened, called)
        if not isinstance(answer, str):
            break
        on = answer  # this worker has taken it over
    handle = Handle(agent, name, on, home, answer, Copy)
    if handle.copies > 1 and on != agent.info.name:
        handle.offer()
    return handle


def open_again(agent: Agent, home: str, name: str, keep: int | None, copies: int) -> Handle | None:
    """Return a handle of a store whose worker is lost, at the one that keeps it now; None if none does."""
    successor = find(agent, home, name)
    return None if successor is None else open_store(agent, name, successor, keep, copies, home)

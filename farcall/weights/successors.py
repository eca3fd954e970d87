"""The second copy of a store at the worker that has it, and how others find it when the keeper is lost.

A worker that has been chosen (``replication.py``) keeps the copy of its host (``copies.py``) up to date. When
another worker has lost the keeper, it asks all workers of the group. The one with the copy checks that it has
lost the keeper as well, and then keeps the store itself: the copy's versions get their numbers, and later
ones come after all that there were. A store keeps its name and the name of the worker where it was made, by
which a worker that joins later, or the restarted one, finds it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from farcall.weights import copies, keeper
from farcall.weights.errors import WeightsError
from farcall.weights.replication import Key, Listing, followers
from rpc.agent.agent import Agent
from rpc.errors import RpcError
from rpc.runtime.current import current_agent
from rpc.serialization.settings import allow_function

__all__ = ["Follower", "be_ready", "find", "opened", "scope_of"]

logger = logging.getLogger(__name__)

_TAKEN_OVER: Final = 1 << 60
"""Rank of a worker that keeps the store already."""

_lock: Final = threading.Lock()


def scope_of(home: str) -> str:
    """Return the scope of the stores that other workers have taken over from a worker."""
    return f"{keeper.TAKEN_OVER}{home}"


class Follower:
    """The second copy of one store, in this process.

    Args:
        key: names the store.
        agent: of this process.
        is_there: whether the keeper answers; raises what ``Source`` raises.
        make_copy: returns the copy of this host, which this process keeps.
    """

    def __init__(
        self,
        key: Key,
        agent: Agent,
        is_there: Callable[[], bool],
        make_copy: Callable[[], copies.HostCopy],
        release: Callable[[], None],
    ) -> None:
        self._key = key
        self._agent = agent
        self._is_there = is_there
        self._make_copy = make_copy
        self._release = release
        self._lock = threading.Lock()
        self._copy: copies.HostCopy | None = None
        self._choice = 0
        self._listing = Listing(1, [], {})

    def follow(self, choice: int, listing: Listing) -> None:
        """See ``replication.Follower``."""
        with self._lock:
            if self._copy is None:
                self._copy = self._make_copy()
            self._choice, self._listing = choice, listing
            self._copy.follow(listing.keep, [serial for _, serial, _ in listing.versions])

    def release(self) -> None:
        """See ``replication.Follower``."""
        with self._lock:
            if self._copy is not None:
                self._copy, self._choice = None, 0
                self._release()

    def rank(self) -> int:
        """Return the number of the keeper's choice if the keeper is lost; 0 if this is no second copy.

        Raises:
            WeightsError: the keeper is there.
        """
        if not self._choice:
            return 0
        if self._is_there():
            raise WeightsError(f"store '{self._key[1]}' is still on its worker")
        return self._choice

    def take_over(self) -> None:
        """Keep the store from now on."""
        home, name, *_ = self._key
        with self._lock, _lock:
            if (scope_of(home), name) in keeper.keepers:
                return
            if self._copy is None:
                raise WeightsError(f"this process has no copy of store '{name}' any more")
            kept = self._copy.take_over(name, self._listing)
            keeper.enter(scope_of(home), name, kept)
            self._copy, self._choice = None, 0
        logger.warning(
            "worker '%s' keeps store '%s' from now on, as worker '%s', which kept it, is lost. It has "
            "versions %s; parts of others have to be put again",
            self._agent.info.name,
            name,
            home,
            kept.versions(),
        )


def be_ready(key: Key, agent: Agent, make: Callable[[], Follower]) -> None:
    """Let the keeper choose this process for the second copy of a store, until the agent ends."""
    with _lock:
        if key not in followers:
            followers[key] = make()
            agent.lifecycle.hooks.closed.append(lambda: followers.pop(key, None))
            agent.lifecycle.hooks.forked.append(followers.clear)


@allow_function
def rank(home: str, name: str, epoch: int | None) -> int:
    """Called at all workers: return whether this one can keep a store whose worker is lost, the largest of
    all workers; 0 if it cannot.
    """
    if (scope_of(home), name) in keeper.keepers:
        return _TAKEN_OVER
    return max((each.rank() for each in _followers_of(home, name, epoch)), default=0)


@allow_function
def take_over(home: str, name: str, epoch: int | None) -> None:
    """Called at the worker that keeps a store from now on."""
    if (scope_of(home), name) not in keeper.keepers:
        for each in _followers_of(home, name, epoch):
            each.take_over()


def _followers_of(home: str, name: str, epoch: int | None) -> list[Follower]:
    incarnation = _own(current_agent()).incarnation
    return [
        each
        for key, each in list(followers.items())
        if key[:2] == (home, name) and epoch in (None, key[2]) and key[3] == incarnation
        if isinstance(each, Follower)
    ]


def _own(agent: Any) -> Agent:
    if not isinstance(agent, Agent):
        raise WeightsError("a store needs an agent of farcall's own backends")
    return agent


def find(agent: Agent, home: str, name: str, epoch: int | None) -> str | None:
    """Return the worker that keeps a store whose worker is lost, by name; None if there is none. It is asked
    to take the store over if it has not done so yet.
    """
    asked = {}
    for member in agent.group.peers.view.present():
        with contextlib.suppress(RpcError):
            asked[member.name] = agent.call_async(member.name, rank, (home, name, epoch), {}, 0.0)
    ranks: dict[str, int] = {}
    for worker, future in asked.items():
        with contextlib.suppress(RpcError):  # it is lost, or cannot keep stores
            ranks[worker] = future.wait()
    for worker in sorted(ranks, key=lambda each: ranks[each], reverse=True):
        if not ranks[worker]:
            return None
        with contextlib.suppress(RpcError):
            if ranks[worker] != _TAKEN_OVER:
                agent.call(worker, take_over, (home, name, epoch), {}, 0.0)
            return worker
    return None


@allow_function
def opened(scope: str, name: str, versions: int | None, number_of_copies: int) -> list[Any] | str:
    """Called at the worker of a store: open it. One with two copies that is not here may have been taken
    over by another worker; the answer is its name then.
    """
    if scope == keeper.GROUP and number_of_copies > 1 and (scope, name) not in keeper.keepers:
        agent = _own(current_agent())
        successor = find(agent, agent.info.name, name, None)
        if successor is not None and successor != agent.info.name:
            return successor
    found: list[Any] = keeper.opened(scope, name, versions, number_of_copies)
    return found

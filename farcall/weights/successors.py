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

__all__ = ["Follower", "be_ready", "end", "find", "opened", "scope_of"]

logger = logging.getLogger(__name__)

_ALIVE: Final = -1
"""Rank of a worker that still reaches the store where it is."""

_TAKEN_OVER: Final = 1 << 62
"""Rank of a worker that keeps the store already."""

_ROUNDS: Final = 3
"""How often all workers are asked while one of them still reaches the store."""

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
        self._listing = Listing(1, [], {}, 0)

    def follow(self, listing: Listing) -> None:
        """See ``replication.Follower``."""
        with self._lock:
            if self._copy is None:
                self._copy = self._make_copy()
            self._listing = listing.with_earlier(self._listing)  # if the keeper is lost before they are here
            self._copy.follow(listing.keep, [serial for _, serial, _ in listing.versions])
            self._listing = listing

    def release(self) -> None:
        """See ``replication.Follower``."""
        with self._lock:
            if self._copy is not None:
                self._copy = None
                self._release()

    def rank(self) -> int:
        """Return how recent this copy is if the keeper is lost: one more than the serial of its newest
        version; 0 if this is no second copy, or ``_ALIVE``.
        """
        copy = self._copy
        if copy is None:
            return 0
        return _ALIVE if self._is_there() else 1 + max(copy.keeper.versions(), default=0)

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
            self._copy = None
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


def end(key: Key) -> None:
    """Keep the second copy of a store no longer, as another worker has taken the store over."""
    follower = followers.pop(key, None)
    if follower is not None:
        follower.release()


@allow_function
def rank(home: str, name: str) -> int:
    """Called at all workers: return whether this one can keep a store whose worker is lost, the largest of
    all workers; 0 if it cannot, -1 if it should not.
    """
    ranks = [each.rank() for each in _followers_of(home, name)]
    if (scope_of(home), name) in keeper.keepers:  # by now
        return _TAKEN_OVER
    return _ALIVE if _ALIVE in ranks else max(ranks, default=0)


@allow_function
def take_over(home: str, name: str) -> None:
    """Called at the worker that keeps a store from now on."""
    if (scope_of(home), name) not in keeper.keepers:
        max(_followers_of(home, name), key=Follower.rank).take_over()


def _followers_of(home: str, name: str) -> list[Follower]:
    incarnation = _own(current_agent()).incarnation
    return [
        each
        for key, each in list(followers.items())
        if key[:2] == (home, name) and key[3] == incarnation
        if isinstance(each, Follower)
    ]


def _own(agent: Any) -> Agent:
    if not isinstance(agent, Agent):
        raise WeightsError("a store needs an agent of farcall's own backends")
    return agent


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
def opened(scope: str, name: str, versions: int | None, number_of_copies: int) -> list[Any] | str:
    """Called at the worker of a store: open it. One with two copies that is not here may have been taken
    over by another worker; the answer is its name then.
    """
    if scope == keeper.GROUP and number_of_copies > 1 and (scope, name) not in keeper.keepers:
        agent = _own(current_agent())
        successor = find(agent, agent.info.name, name)
        if successor is not None:
            return successor
    found: list[Any] = keeper.opened(scope, name, versions, number_of_copies)
    return found

"""The second copy of a store, as its keeper sees it: which worker has it, and how far it is.

Workers that open a store with ``copies=2`` offer to keep its second copy. The keeper chooses one, rather one
of another host, and sends it the list of versions, again whenever that changes; the worker's answer says that
it has them. One such call is under way at a time. If the worker is lost or fails, another one is chosen. If
one of another host offers later, it is chosen as well, and the one of this host is released once the new
one has all versions. If the keeper dies, the one that has the newest version takes over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from farcall.weights.errors import WeightsError
from rpc.agent.agent import Agent
from rpc.errors import RpcError
from rpc.serialization.settings import allow_function

__all__ = ["Follower", "Key", "Listing", "SecondCopy", "followers"]

logger = logging.getLogger(__name__)

Key = tuple[str, str, int, int]
"""A store: the worker on which it was made, its name, its epoch, and the incarnation of the agent here."""


class Listing(NamedTuple):
    """What a second copy is to have: how many versions stay; number, serial and metadata of each, in order;
    the tags; and the serial after which those of this keeper begin.
    """

    keep: int
    versions: list[Any]
    tags: dict[str, int]
    after: int

    @property
    def newest(self) -> int:
        """The serial of the newest version; 0 if there is none."""
        return self.versions[-1][1] if self.versions else 0

    def with_earlier(self, earlier: Listing) -> Listing:
        """Return a listing that has the versions and tags of an earlier one as well."""
        serials = {serial for _, serial, _ in self.versions}
        others = [each for each in earlier.versions if each[1] not in serials]
        versions = sorted([*others, *self.versions], key=lambda each: each[1])
        return self._replace(versions=versions, tags=earlier.tags | self.tags)


class Follower(Protocol):
    """The worker's side of a second copy."""

    def follow(self, listing: Listing) -> None:
        """Have the versions of a listing, and no others."""

    def release(self) -> None:
        """Keep no copy any more."""


followers: Final[dict[Key, Follower]] = {}
"""The stores of which this process can keep the second copy."""


@allow_function
def follow(key: list[Any], listing: list[Any]) -> None:
    """Called at the worker that has been chosen: see ``Follower``."""
    _follower(key).follow(Listing(*listing))


@allow_function
def release(key: list[Any]) -> None:
    """Called at the worker that is not needed any more."""
    _follower(key).release()


def _follower(key: Sequence[Any]) -> Follower:
    home, name, epoch, incarnation = key
    follower = followers.get((home, name, epoch, incarnation))
    if follower is None:
        raise WeightsError(f"this process does not use store '{name}' any more")
    return follower


class SecondCopy:
    """The second copy of one store. From any thread.

    Args:
        agent: by which the worker is called.
        key: names the store, without the incarnation.
        host: of the keeper.
    """

    def __init__(self, agent: Agent, key: tuple[str, str, int], host: str) -> None:
        self._agent = agent
        self._key = key
        self._own_host = host
        self._lock = threading.Lock()
        self._offers: dict[int, str] = {}
        """Hosts of the workers that have offered, by their incarnation."""
        self._chosen: int | None = None
        self._before: int | None = None
        """The worker that was chosen before, and is chosen again if the new one is lost or fails."""
        self._failed: set[int] = set()
        """Workers that have failed. They are released, as ``_before`` is, once the chosen one has all."""
        self._ended = False
        self._listing = Listing(1, [], {}, 0)
        self._sent: Listing | None = None
        """The listing that is under way, or has arrived."""
        self._under_way = False
        self._has = -1
        """The serial of the newest version that the chosen worker has; -1: it has not answered."""
        self._waiting: list[tuple[int, torch.futures.Future[None]]] = []

    def offer(self, incarnation: int, host: str) -> None:
        """A worker can keep the copy."""
        with self._lock:
            self._offers[incarnation] = host
        self._go_on()

    def host_of(self) -> tuple[int, str] | None:
        """Return the worker that has the copy, and its host; None without one."""
        with self._lock:
            chosen = self._chosen
            return None if chosen is None or chosen not in self._offers else (chosen, self._offers[chosen])

    def update(self, listing: Listing) -> None:
        """The versions have changed."""
        with self._lock:
            self._listing = listing
        self._go_on()

    def lost(self, incarnation: int) -> None:
        """A worker is lost."""
        with self._lock:
            self._forget(incarnation)
            self._failed.discard(incarnation)
        self._go_on()

    def is_whole(self) -> bool:
        """Whether the second copy has all versions."""
        with self._lock:
            return self._chosen is not None and self._has >= self._listing.newest

    def wait(self, serial: int) -> torch.futures.Future[None]:
        """Return a future that is completed once the second copy has a version, or there is no worker that
        could keep it.
        """
        future: torch.futures.Future[None] = torch.futures.Future()
        with self._lock:
            self._waiting.append((serial, future))
        self._go_on()
        return future

    def close(self) -> None:
        """The keeper ends."""
        with self._lock:
            self._ended = True
            self._offers.clear()
            self._chosen = None
        self._go_on()

    # ---- inside

    def _forget(self, incarnation: int) -> None:
        self._offers.pop(incarnation, None)
        if self._before == incarnation:
            self._before = None
        if self._chosen == incarnation:
            self._chosen, self._has, self._sent = self._before, -1, None
            self._before = None

    def _choose(self) -> None:
        there = self._offers
        best = next((each for each, host in there.items() if host != self._own_host), next(iter(there), None))
        if best is None or best == self._chosen:
            return
        if self._chosen is not None:
            if there[self._chosen] != self._own_host or there[best] == self._own_host:
                return
            self._before = self._chosen
        self._chosen, self._has, self._sent = best, -1, None
        self._failed.discard(best)

    def _go_on(self) -> None:
        """Choose a worker, send it what it lacks, and complete the waits that have an answer."""
        call: Callable[[], None] | None = None
        with self._lock:
            ended = self._ended or self._agent.lifecycle.closed
            is_needed = self._waiting or not self._agent.lifecycle.departure.begun
            if is_needed and not self._under_way and not ended:
                self._choose()
                if self._chosen is not None and self._sent != self._listing:
                    self._under_way, self._sent = True, self._listing
                    chosen, listing = self._chosen, self._listing
                    call = lambda: self._send(chosen, listing)  # noqa: E731  # after the lock
            done = [each for each in self._waiting if ended or self._is_done(each[0])]
            self._waiting = [each for each in self._waiting if each not in done]
        if done:
            self._agent.calls.completions.run_soon([(future.set_result, None) for _, future in done])
        if call is not None:
            self._agent.calls.completions.run_soon([(lambda _: call(), None)])

    def _is_done(self, serial: int) -> bool:
        """Whether the chosen worker has a version, or all that there are, or no worker could have it."""
        if self._chosen is None:
            return not self._offers
        return min(serial, self._listing.newest) <= self._has

    def _send(self, chosen: int, listing: Listing) -> None:
        member = self._agent.group.peers.view.find(chosen)
        try:
            if member is None:
                raise WeightsError("it has left the group")
            args = ([*self._key, chosen], list(listing))
            future = self._agent.call_async(member.name, follow, args, {}, 0.0)
        except Exception as error:  # as if the call had failed
            self._answered(chosen, listing, error)
            return
        future.add_done_callback(lambda done: self._answered(chosen, listing, _error_of(done)))

    def _answered(self, chosen: int, listing: Listing, error: BaseException | None) -> None:
        released: set[int] = set()
        lifecycle = self._agent.lifecycle
        with self._lock:
            self._under_way = False
            if error is not None:
                self._forget(chosen)
                self._failed.add(chosen)
            elif self._chosen == chosen:
                self._has = listing.newest
                released, self._failed = self._failed, set()
                if self._before is not None:
                    released.add(self._before)
                    self._before = None
        if error is not None:
            leaves = self._ended or lifecycle.closed or lifecycle.departure.begun
            level = logging.DEBUG if leaves else logging.WARNING
            logger.log(level, "the second copy of store '%s' has failed: %s", self._key[1], error)
        for each in released:
            member = self._agent.group.peers.view.find(each)
            if member is not None:
                with contextlib.suppress(RpcError):  # it is lost
                    self._agent.call_async(member.name, release, ([*self._key, each],), {}, 0.0)
        self._go_on()


def _error_of(future: Any) -> BaseException | None:
    try:
        future.value()
    except Exception as error:  # any error of the other worker
        return error
    return None

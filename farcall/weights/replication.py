"""The second copy of a store, as its keeper sees it: which worker has it, and how far it is.

Workers that open a store with ``copies=2`` offer to keep its second copy. The keeper chooses one, rather one
of another host, and sends it the list of versions, again whenever that changes; the worker's answer says that
it has them. One such call is under way at a time. If the worker is lost or fails, another one is chosen; if
all have failed, they are asked again for the next versions. If one of another host offers later, it is chosen
as well, and those that had versions before are released once the new one has all. If the keeper dies, the one
that has the newest version takes over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from farcall.weights.errors import WeightsError
from farcall.weights.node import call_kept
from rpc.agent.agent import Agent
from rpc.errors import RpcError
from rpc.runtime.legible import legible

__all__ = ["Listing", "SecondCopy"]

logger = logging.getLogger(__name__)


class Listing(NamedTuple):
    """What a second copy is to have: how many versions stay; number, serial and metadata of each, in order;
    the tags; the serial after which those of this keeper begin; and numbers and serials of versions that the
    store had before.
    """

    keep: int
    versions: list[Any]
    tags: dict[str, int]
    after: int
    removed: Sequence[Any] = ()

    @property
    def newest(self) -> int:
        """The serial of the newest version; 0 if there is none."""
        return self.versions[-1][1] if self.versions else 0

    def with_earlier(self, earlier: Listing, here: Container[int]) -> Listing:
        """Return a listing that has the tags and those versions of an earlier one as well that are ``here``,
        by serial.
        """
        serials = {serial for _, serial, _ in self.versions}
        others = [each for each in earlier.versions if each[1] in here and each[1] not in serials]
        versions = sorted([*others, *self.versions], key=lambda each: each[1])
        return self._replace(versions=versions, tags=earlier.tags | self.tags)


@dataclass
class Worker:
    """A worker that has offered to keep the copy.

    Attributes:
        host: its host.
        copy: the id of the copy that it can keep.
        asked: whether it has been chosen, and was not released since.
        has: the serial of the newest version that the copy has; -1 before an answer, and after a failure.
        failed: whether it is not chosen, as it has failed, and others have not.
    """

    host: str
    copy: int
    asked: bool = False
    has: int = -1
    failed: bool = False


class SecondCopy:
    """The second copy of one store. From any thread.

    Args:
        agent: by which the worker is called.
        name: of the store.
        host: of the keeper.
    """

    def __init__(self, agent: Agent, name: str, host: str) -> None:
        self._agent = agent
        self._name = name
        self._host = host
        self._lock = threading.Lock()
        self._workers: dict[int, Worker] = {}
        """By their incarnation. Those of earlier choices and of failures are released once the chosen one has
        all versions.
        """
        self._chosen: int | None = None
        self._ended = False
        self._listing = Listing(1, [], {}, 0)
        self._sent: Listing | None = None
        """The listing that is on its way to the chosen worker, or has arrived."""
        self._under_way = False
        self._waiting: list[tuple[int, torch.futures.Future[str | None]]] = []
        self._failure = ""
        """The last failure of a worker that was chosen."""

    def offer(self, incarnation: int, host: str, copy: int) -> None:
        """A worker can keep the copy."""
        with self._lock:
            worker = self._workers.setdefault(incarnation, Worker(host, copy))
            worker.copy, worker.failed = copy, False
        self._go_on()

    def on_host(self, host: str) -> tuple[int, int] | None:
        """Return the worker that has the copy, and the copy's id, if it is on this host."""
        with self._lock:
            there = self._workers.items()
            found = ((which, each.copy) for which, each in there if each.host == host)
            return next((place for place in found if place[0] == self._chosen), None)

    def update(self, listing: Listing) -> None:
        """The versions have changed."""
        with self._lock:
            self._listing = listing
            self._retry_failed()
        self._go_on()

    def lost(self, incarnation: int) -> None:
        """A worker is lost."""
        with self._lock:
            self._workers.pop(incarnation, None)
            self._retry_failed()
        self._go_on()

    def is_whole(self) -> bool:
        """Whether the second copy has all versions."""
        with self._lock:
            return self._is_there(self._listing.newest)

    def wait(self, serial: int) -> torch.futures.Future[str | None]:
        """Return a future that is completed once the second copy has a version, with None; or once there is
        no worker that has not failed to get it, with the reason.
        """
        future: torch.futures.Future[str | None] = torch.futures.Future()
        with self._lock:
            self._waiting.append((serial, future))
        self._go_on()
        return future

    def close(self) -> None:
        """The keeper ends."""
        with self._lock:
            self._ended = True
        self._go_on()

    # ---- inside

    def _retry_failed(self) -> None:
        """If all have failed, ask them again."""
        if all(each.failed for each in self._workers.values()):
            for each in self._workers.values():
                each.failed = False

    def _choose(self) -> int | None:
        """Return the worker that is to have the copy; it stays, except that one of another host is better."""

        def rank(incarnation: int) -> tuple[bool, bool, int]:
            worker = self._workers[incarnation]
            return worker.host != self._host, incarnation == self._chosen, worker.has

        there = (incarnation for incarnation, each in self._workers.items() if not each.failed)
        return max(there, key=rank, default=None)

    def _go_on(self) -> None:
        """Choose a worker, send it what it lacks, and complete the waits that have an answer."""
        send: tuple[int, int, Listing] | None = None
        with self._lock:
            ended = self._ended or self._agent.lifecycle.closed
            is_needed = self._waiting or not self._agent.lifecycle.departure.begun
            chosen = self._choose()
            if chosen != self._chosen:
                self._chosen, self._sent = chosen, None
            if chosen is not None and is_needed and not ended and not self._under_way:
                worker = self._workers[chosen]
                worker.asked = True
                if self._sent != self._listing:
                    self._under_way, self._sent = True, self._listing
                    send = chosen, worker.copy, self._listing
            alone = self._why_alone() if ended or chosen is None else None
            done = [each for each in self._waiting if alone or self._is_there(each[0])]
            self._waiting = [each for each in self._waiting if each not in done]
            answers = [(future, None if self._is_there(serial) else alone) for serial, future in done]
        soon = self._agent.executor.submit_batch
        if done:
            soon([(future.set_result, answer) for future, answer in answers])
        if send is not None:
            soon([(self._send, send)])

    def _is_there(self, serial: int) -> bool:
        """Whether a worker has a version, or all that there are."""
        needed = min(serial, self._listing.newest)
        return any(each.has >= needed for each in self._workers.values())

    def _why_alone(self) -> str:
        """Describe why no worker has the copy."""
        if not self._workers:
            return "no other worker has opened the store with copies=2"
        return self._failure or "the store's worker is leaving its group"

    def _send(self, send: tuple[int, int, Listing]) -> None:
        chosen, copy, listing = send
        try:
            future = self._call(chosen, copy, "follow", *listing)
        except Exception as error:  # as if the call had failed
            self._fails(chosen, error)
            return
        future.add_done_callback(lambda answer: self._answered(chosen, answer))

    def _call(self, incarnation: int, copy: int, what: str, *args: Any) -> Any:
        member = self._agent.group.peers.view.find(incarnation)
        if member is None:
            raise WeightsError("it has left the group")
        return call_kept(self._agent, member.name, incarnation, copy, self._name, what, *args)

    def _answered(self, chosen: int, answer: Any) -> None:
        try:
            newest: int = answer.value()
        except Exception as error:  # any error of the other worker
            self._fails(chosen, error)
            return
        released: list[tuple[int, int]] = []
        with self._lock:
            self._under_way = False
            if chosen in self._workers:
                self._workers[chosen].has = newest
                if chosen == self._chosen and newest >= self._listing.newest:
                    others = {which: each for which, each in self._workers.items() if which != chosen}
                    released = [(which, each.copy) for which, each in others.items() if each.asked]
                    for each in others.values():
                        each.asked, each.has = False, -1
        for incarnation, copy in released:
            with contextlib.suppress(RpcError, WeightsError):  # it is lost
                self._call(incarnation, copy, "release_copy")
        self._go_on()

    def _fails(self, chosen: int, error: Exception) -> None:
        with self._lock:
            self._under_way, self._failure = False, str(error)
            if chosen in self._workers:
                self._workers[chosen].has, self._workers[chosen].failed = -1, True
            if chosen == self._chosen:
                self._chosen = self._sent = None
        lifecycle = self._agent.lifecycle
        leaves = self._ended or lifecycle.closed or lifecycle.departure.begun
        level = logging.DEBUG if leaves else logging.WARNING
        logger.log(level, "the second copy of store '%s' has failed: %s", self._name, legible(error))
        self._go_on()

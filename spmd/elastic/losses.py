"""Knows which workers are lost, and which of them have ended for certain.

Between hosts a lost worker may live on. On one host the kernel tells which processes have ended. What counts
as certain is explained in ``agreement``, "One job, never two".
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from time import monotonic
from typing import Any, Final, Protocol

from rpc.errors import NotInitializedError, RendezvousError, RpcError
from rpc.group.peer import Peer
from rpc.rendezvous.log import Log
from rpc.rendezvous.store import SharedStore
from rpc.runtime.process_signs import has_ended, has_own_proc, start_time
from spmd.elastic.errors import ElasticError

__all__ = ["FINISHED", "LOG_SECONDS", "Losses", "Observer"]

FINISHED: Final = "elastic/finished"
"""The key in the group's store under which the job's last step is, once it has ended."""

LOG_SECONDS: Final = 0.5
"""Interval at which the group's log is read while this member may not go on, and timeout of one look."""
_NOTICE_SECONDS: Final = 12.0
"""Time in seconds in which workers that are cut off must have noticed it, or have paused for longer than
``_STOPPED_SECONDS``.
"""

_STOPPED_SECONDS: Final = 8.0
"""A pause of the agent's loop after which this process may have been excluded unnoticed."""

_ENDED: Final = -1
"""In place of the time when a process was started."""


class Observer(Protocol):
    """A part of a protocol that acts on losses; see ``agreement.Member``."""

    me: int
    dead: set[int]

    def partners(self) -> set[int]:
        """Return the workers whose losses matter."""

    def witnessed(self, incarnation: int) -> None:
        """Record that a worker has ended, for certain."""

    def was_stopped(self) -> None:
        """Record that this process did not run for a while."""

    def was_removed(self, incarnations: Iterable[int]) -> None:
        """Record workers that are not in the group's log, though this one is."""


class Losses:
    """The losses that the agent of this worker has noticed. From any thread.

    Args:
        agent: the agent.
        core: this member's part of the protocol, which ``take_in`` tells of certain ends.
        changed: the lock of ``core``.
        on_loss: called after each loss, on the loop's thread, with the incarnation.
        on_out: called on the loop's thread, with the reason, when this worker is out of its group.
    """

    def __init__(
        self,
        agent: Any,
        core: Observer,
        changed: threading.Condition,
        on_loss: Callable[[int], object],
        on_out: Callable[[str], object],
    ) -> None:
        self._agent, self._core, self._changed = agent, core, changed
        self._on_loss, self._on_out = on_loss, on_out
        self._gone: queue.SimpleQueue[tuple[int, bool] | None] = queue.SimpleQueue()
        self._processes: dict[int, tuple[int, int]] = {}
        self._tick = monotonic()
        self._closed = threading.Event()
        self._asked: Future[list[int]] | None = None
        """What was asked of the group's log."""

    def begin(self) -> None:
        """Begin to note losses."""
        self._agent.lifecycle.hooks.gone.append(self._note)
        self._agent.lifecycle.hooks.out.append(self._on_out)
        self._agent.group.on_loop(self._beat)

    def close(self) -> None:
        """Note no losses any more. Idempotent."""
        self._closed.set()
        with contextlib.suppress(ValueError):
            self._agent.lifecycle.hooks.gone.remove(self._note)
            self._agent.lifecycle.hooks.out.remove(self._on_out)

    def _note(self, peer: Peer, reason: str) -> None:
        # Called on the loop's thread, where it must be judged whether the end is certain.
        paused = monotonic() - self._tick > _STOPPED_SECONDS
        if paused:
            self._gone.put(None)
        certain = peer.has_left or self.has_ended(peer.incarnation)
        self._gone.put((peer.incarnation, certain and not paused))
        self._on_loss(peer.incarnation)

    def _beat(self) -> None:
        """Notice pauses of this process, on the loop's thread."""
        now = monotonic()
        if now - self._tick > _STOPPED_SECONDS:
            self._gone.put(None)
        self._tick = now
        if not self._closed.is_set():
            self._agent.group.connections.loop.call_later(1.0, self._beat)

    def take_in(self) -> None:
        """Tell the core of the losses since the last call; with the lock held."""
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._gone.get_nowait()
                if event is None:
                    self._core.was_stopped()
                elif event[1]:
                    self._core.witnessed(event[0])

    # ---- workers

    def peer(self, incarnation: int) -> Peer | None:
        """Return a worker; None if the group has forgotten it."""
        peer: Peer | None = self._agent.group.peers.by_incarnation(incarnation)
        return peer

    def is_lost(self, incarnation: int) -> bool:
        """Whether a worker is lost, which another host may not confirm."""
        if incarnation == self._core.me:
            return False
        peer = self.peer(incarnation)
        return peer is None or peer.lost is not None

    def is_out_of_reach(self, incarnation: int) -> bool:
        """Whether a worker is lost, but may live."""
        return self.is_lost(incarnation) and incarnation not in self._core.dead

    def watch_processes(self, members: Iterable[int]) -> None:
        """Remember the processes of members on this host, whose ends the kernel tells; with the lock held."""
        own_host = self._agent.group.peers.own.member.host
        for each in members:
            peer = self.peer(each)
            if peer is None or peer.lost is not None or each in self._processes:
                continue
            process = peer.link.process
            if peer.member.host == own_host and process is not None and has_own_proc():
                start = start_time(process)
                if start is not None or has_ended(process):  # it may only be hidden
                    self._processes[each] = process, _ENDED if start is None else start

    def cut_off(self, workers: Collection[int], reason: str, released: threading.Event) -> None:
        """Cut off workers without which the others go on, so that they know of no death for certain from now
        on; and wait until they must have noticed, unless they have died, which another worker may have seen
        first, or ``released`` is set.
        """
        for each in workers:
            peer = self.peer(each)
            if peer is not None:
                self._agent.group.lose(peer, reason)
        if not all(map(self.has_ended, workers)):
            released.wait(_NOTICE_SECONDS)

    def has_ended(self, incarnation: int) -> bool:
        """Whether a worker's process runs no code any more, as the kernel of this host says."""
        process = self._processes.get(incarnation)
        return process is not None and _has_ended(*process)

    # ---- the group's log

    def on_store(self, work: Callable[[SharedStore], Any]) -> Any:
        """Return what a function of the group's store returns, asking again while another worker takes the
        store over.

        Raises:
            ElasticError: the store does not answer, or this worker is out of its group.
        """
        deadline = monotonic() + self._agent.options.rendezvous_timeout
        keeper = self._agent.extensions["rpc.keeper"]
        while True:
            try:
                return keeper.ask(work).result(timeout=max(0.0, deadline - monotonic()))
            except NotInitializedError as error:
                raise ElasticError(str(error)) from error
            except (TimeoutError, RendezvousError) as error:  # another worker may serve it soon
                if monotonic() > deadline or self._closed.is_set():
                    name = self._agent.group.peers.own.name
                    raise ElasticError(f"worker '{name}': the group's store does not answer") from error
            self._closed.wait(LOG_SECONDS)

    def present(self) -> set[int]:
        """Return the workers that are in the group's log."""
        found: set[int] = self.on_store(lambda store: _present(Log(store)))
        return found

    def misses_present_workers(self) -> bool:
        """Whether a lost worker that may live is still in the group's log."""
        present = self.present()
        with self._changed:
            self.take_in()
            return any(map(self.is_out_of_reach, present))

    def read_log(self) -> None:
        """Read from the group's log which workers were removed while this one was in it.

        If it does not answer soon, the next call takes the answer.
        """
        me = self._core.me
        wanted = [each for each in self._core.partners() if self.is_lost(each)]

        def read(store: SharedStore) -> list[int]:
            removed = set(wanted) - _present(Log(store))
            return sorted(removed) if me in _present(Log(store)) else []

        asked = self._asked = self._asked or self._agent.extensions["rpc.keeper"].ask(read)
        try:
            removed = asked.result(timeout=LOG_SECONDS)
        except (TimeoutError, RpcError):
            return
        finally:
            if asked.done():
                self._asked = None
        with self._changed:
            self._core.was_removed(removed)


def _present(log: Log) -> set[int]:
    return {
        each.arrival.member.incarnation for each in log.read() if each.arrival is not None and each.is_present
    }


def _has_ended(process: int, start: int) -> bool:
    """Whether a process runs no code any more, or another one has its id."""
    try:
        return start_time(process) != start or has_ended(process)
    except OSError:
        return False  # this process could not look

"""The duties of a dynamic group's members to later joiners: the group outlives its store.

Each member watches the store, and reads the log in it every few seconds (``watching``). When the store is
gone, with the process that served it, a member on that host serves another at the same address; the others
connect to it as soon as they can, and all add the members to its log of arrivals again. A newcomer, such as a
restarted first worker, that reads the log after that finds them, and joins the existing group. If it has come
before any of them, they find it in the log, and connect to it. Calls between members need no store.

*There is only one group.* Members may lose each other and live: the network between them was gone for long,
or a process was stopped. The group is then what the log shows; ``parting`` decides which members stay in it.
A member whose own entry was removed leaves, as all others are lost to it. So does a member that returns to a
log in which its own entry is preceded by a living member that it has lost.

Theory: *of any two workers that live, one finds the other.* A joiner reads all entries before its own, a
member that returns reads all entries after its own was written. So for two of them, whichever entry was
written first, the other one's reader sees it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from rpc.errors import NotAdmittedError, NotInitializedError, RendezvousError, RendezvousTimeoutError
from rpc.rendezvous.address import probe
from rpc.rendezvous.arrivals import DEFAULT_PACE, Arrival
from rpc.rendezvous.dynamic import DynamicGroup, Joining
from rpc.rendezvous.log import Log
from rpc.rendezvous.store import Abandoned, SharedStore, StoreLost, StoreWait
from rpc.rendezvous.watching import LogWatch, Neighbours, PutOut
from rpc.runtime.blocking import Event, wait_for_event
from rpc.runtime.interrupts import protected

__all__ = ["Keeper", "Loss"]

logger = logging.getLogger(__name__)

_QUICK_SECONDS: Final = 0.01
_SLOW_SECONDS: Final = 1.0
"""Intervals in seconds at which the store is checked: right after a member was lost, which may have served
it, and later.
"""

_LOOK_SECONDS: Final = 2.0
"""Interval in seconds at which a member reads the log when nothing has happened."""

_GRACE_SECONDS: Final = 2.0
"""Time in seconds beyond its deadline for the keeper to report why a worker has not become a member."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that is gone; ``left`` if it has said goodbye."""

    incarnation: int
    left: bool = False


@dataclass(frozen=True, slots=True)
class _Errand:
    """Something to be done with the store, on the keeper's thread."""

    work: Callable[[SharedStore], Any]
    outcome: Future[Any]

    def run(self, store: SharedStore) -> None:
        try:
            self.outcome.set_result(self.work(store))
        except StoreLost as lost:
            self.outcome.set_exception(RendezvousError(f"{store.description} does not answer: {lost}"))
        except Exception as error:
            self.outcome.set_exception(error)


class Keeper:
    """Keeps one worker of a dynamic group visible to newcomers, on a thread of its own.

    Args:
        group: the group as this worker has joined it; its store belongs to the keeper from now on.
        timeout: timeout in seconds for a lost store to be served again, and for becoming a member.
        neighbours: the other workers.
    """

    def __init__(self, group: DynamicGroup, timeout: float, neighbours: Neighbours) -> None:
        self._me = group.me
        self._store = group.store
        self._timeout = timeout
        self._neighbours = neighbours
        self._lost = False
        self._look_at = 0.0
        self._orders: queue.SimpleQueue[Loss | _Errand | None] = queue.SimpleQueue()
        self._waiting = StoreWait(timeout)
        self._watch = LogWatch(group, neighbours, self._waiting, probe, DEFAULT_PACE)
        self._membership: Future[None] = Future()
        self._complaint = ""
        self._leaving = False
        self._left = Event()
        self._has_left = False
        self._thread = threading.Thread(target=self._run, name="farcall-keeper", daemon=True)
        store = self._store
        atexit.register(lambda: store)  # this process may serve it, and others need it until the process ends

    def start(self) -> None:
        """Start the thread, after this worker has connected to the others as far as it could."""
        self._watch.waiting = StoreWait(self._timeout)
        self._thread.start()

    def wait_until_member(self) -> None:
        """Wait until this worker is a member of the group.

        Raises:
            RendezvousError: it cannot become one; the text says why.
            RendezvousTimeoutError: that depends on others, which do not answer in time.
        """
        decided = Event()
        self._membership.add_done_callback(lambda _: decided.set())
        if not wait_for_event(decided, time.monotonic() + self._timeout + _GRACE_SECONDS):
            because = f": {self._complaint}" if self._complaint else ""
            raise RendezvousTimeoutError(
                f"{Arrival.of(self._me, 0)} has not become a member of its dynamic group within "
                f"{self._timeout:g} s, since {self._store.description} does not answer{because}"
            )
        self._membership.result()

    def worker_gone(self, loss: Loss) -> None:
        """Record that a worker is gone. From any thread; never blocks."""
        self._orders.put(loss)

    def ask(self, work: Callable[[SharedStore], Any]) -> Future[Any]:
        """Have ``work`` called with the group's store, on the keeper's thread. From any thread.

        Returns:
            A future of its value; it fails with ``RendezvousError`` if the store does not answer, and with
            ``NotInitializedError`` if this worker has left its group.
        """
        outcome: Future[Any] = Future()
        self._orders.put(_Errand(work, outcome))
        if self._left.is_set():
            self._refuse_orders()
        return outcome

    @protected
    def leave(self, timeout: float = 2.0) -> bool:
        """Make later joiners ignore this worker, and end; returns whether the store accepted it in time."""
        self._leaving = True
        self._waiting.abandon()
        self._orders.put(None)
        if self._thread.ident is None:
            self._thread.start()
        return wait_for_event(self._left, time.monotonic() + timeout) and self._has_left

    def abandon_after_fork(self) -> None:
        """Release what belongs to the parent, in a forked child."""
        self._store.forget_line()

    def _run(self) -> None:
        pause = _SLOW_SECONDS
        while not self._leaving:
            try:
                self._look()
            except StoreLost:
                self._note_loss()
            except Abandoned:
                break
            except PutOut as out:
                self._go(str(out))
            except RendezvousError as error:
                self._failed(error)
            except Exception as error:
                if repr(error) != self._complaint:
                    self._complaint = repr(error)
                    logger.exception("the keeper of worker '%s' failed", self._me.name)
            is_pending = self._watch.is_pending and not self._complaint
            if self._wait(min(pause, DEFAULT_PACE.answer / 10) if is_pending else pause):
                pause = _QUICK_SECONDS
            else:
                pause = min(2 * pause, _SLOW_SECONDS)
        try:
            if not self._lost:
                log = Log(self._store)
                for place in self._watch.places:
                    log.remove(place)
                self._has_left = True
        except StoreLost:
            pass
        finally:
            self._store.forget_line()
            self._left.set()
            self._refuse_orders()

    def _refuse_orders(self) -> None:
        """Fail what was asked of the store, as the thread has ended. From any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                order = self._orders.get_nowait()
                if isinstance(order, _Errand):
                    error = NotInitializedError(f"worker '{self._me.name}' has left its dynamic group")
                    order.outcome.set_exception(error)

    def _wait(self, seconds: float) -> bool:
        """Wait; returns whether a worker was lost in the meantime."""
        try:
            loss = self._orders.get(timeout=seconds)
        except queue.Empty:
            return False
        if isinstance(loss, _Errand):
            loss.run(self._store)
            return False
        if loss is not None and loss.left:
            self._watch.worker_left(loss.incarnation)
        self._look_at = 0.0
        return True

    def _look(self) -> None:
        if self._lost or self._store.seems_lost():
            self._come_back()
        elif self._watch.is_pending or time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            self._watch.look()
            self._complaint = ""
            if self._watch.is_member and not self._membership.done():
                self._membership.set_result(None)

    def _failed(self, error: RendezvousError) -> None:
        """Handle that newcomers, of which this worker may be one, cannot join."""
        if not self._watch.is_member:
            self._leaving = True
            self._membership.set_exception(error)
        elif str(error) != self._complaint:
            self._complaint = str(error)
            logger.warning("newcomers cannot join the group of '%s': %s", self._me.name, error)

    def _go(self, why: str) -> None:
        """Leave: another part of the group, which has removed this worker, is the group now."""
        self._leaving = True
        reason = (
            f"worker '{self._me.name}' is out of its group: {why}. It must start again to take part in it"
        )
        if not self._watch.is_member:
            self._membership.set_exception(NotAdmittedError(reason))
            return
        logger.error("%s", reason)
        self._neighbours.put_out(reason)

    def _come_back(self) -> None:
        self._note_loss()
        description, name, watch = self._store.description, self._me.name, self._watch
        if self._store.opener is None:
            self._store.forget_line()
            self._leaving = True
            lost = f"{description} is lost. It was passed as an object, so that it cannot be opened again"
            if not watch.is_member:
                self._membership.set_exception(RendezvousError(f"'{name}' cannot join its group: {lost}"))
                return
            logger.warning("%s: the group of '%s' continues, and no worker can join it any more", lost, name)
            return
        self._waiting = StoreWait(self._timeout)
        if self._leaving:
            raise Abandoned
        self._store.reopen(self._waiting)
        log = Log(self._store)
        if any(log.is_out(place, self._me.incarnation) for place in watch.places):
            self._lost = False
            return  # the next read reports it
        # The first one adds all members that it knows: others may be slow, and their names are taken.
        first = watch.is_member and self._store.add("kept", 1) == 1
        whom = self._neighbours.roster() if first else [self._me]
        joining = Joining(self._store, Arrival.of(self._me, 0), self._waiting, probe, DEFAULT_PACE)
        found = joining.come_back(log, whom, watch.verdict().kind)
        watch.start_again(set(log.places(self._me.incarnation)))
        self._lost, self._look_at = False, 0.0
        rivals = [
            each
            for each in found
            if self._neighbours.gone_reason(each.incarnation) is not None and probe(each) is not False
        ]
        if any(min(log.places(each.incarnation)) < min(watch.places) for each in rivals):
            raise PutOut(
                f"it has lost {', '.join(repr(each.name) for each in rivals)}, and the group goes on there"
            )
        logger.info("newcomers find the group of '%s' at %s again", name, description)
        known = {each.incarnation for each in self._neighbours.roster()}
        self._neighbours.meet([each for each in found if each.incarnation not in known])

    def _note_loss(self) -> None:
        if not self._lost:
            self._lost = True
            logger.info(
                "%s is gone; the group of '%s' continues, and newcomers wait until a member serves it again",
                self._store.description,
                self._me.name,
            )

"""What members of a dynamic group do for those who come later: the group outlives its store.

Each member watches the store. When it is gone, with the process that served it, a member on that host serves
another at the same address; the others connect to it as soon as they can, and all see to it that the log of
arrivals shows the members again. Who reads the log after that finds them, so a newcomer, a restarted first
worker among them, joins the group that is there. Should it have come before any of them, they find it in the
log, and connect to it. Calls between members need no store.

Of a member that was lost, the one with the smallest id takes the entries out. It may die before it has: so
whoever is next takes out all whom it has lost itself, but those who live after a while only.

*One group goes on, never two.* Members may lose each other and live: the network between them was gone for
long, or a process was stopped. What is in the log is the group then. Who has lost others takes their entries
out, unless its own are out already; of two that do so at once, the store tells one to stop. Who finds its own
out leaves: all that it still knows is lost to it. So
does a member that comes back to a log in which, before its own entry, stands a living one that it has lost.

Theory: *of any two workers that live, one finds the other.* A joiner reads all entries before its own, a
member that comes back reads all entries after its own was written. So for two of them, whichever entry was
written first, the other one's reader sees it.
"""

from __future__ import annotations

import atexit
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rpc.errors import RendezvousError
from rpc.group.workers import Member
from rpc.rendezvous.address import Probe, probe
from rpc.rendezvous.arrivals import DEFAULT_PACE, Arrival, Pace
from rpc.rendezvous.dynamic import DynamicGroup, Joining
from rpc.rendezvous.store import Abandoned, Log, StoreLost, Waiting
from rpc.runtime.interrupts import interruptible, protected

__all__ = ["Keeper", "Loss"]

logger = logging.getLogger(__name__)

_QUICK_SECONDS: Final = 0.01
_SLOW_SECONDS: Final = 1.0
"""How often the store is looked at: at first after a member was lost, which may have served it; and later."""

_LOOKS_AT_THE_DEAD: Final = 3
"""A process's connections end before its listeners: so often a lost member may still seem to live."""

_RARELY_SECONDS: Final = 30.0
"""How often a member that has lost living ones looks whether it is still in the log, in the end."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A member is gone: ``may_live`` unless it left or has ended; ``gave_up`` if it has lost this worker."""

    incarnation: int
    may_live: bool = False
    gave_up: bool = False


class Keeper:
    """Keeps one member of a dynamic group where newcomers find it, on a thread of its own.

    Args:
        group: as this worker has joined it; its store is the keeper's from now on.
        timeout: seconds to wait at a time for somebody to serve a lost store again.
        roster: returns the members that this worker knows, itself among them; called on the keeper's thread.
        meet: told of members that this worker may not know; likewise.
        put_out: told why, when others have taken this worker out of the group; likewise.
        given_up: tells whether this worker has lost a member.
        tell: tells whether a member lives.
        pace: how patient to be with joiners that do not finish.
    """

    def __init__(
        self,
        group: DynamicGroup,
        timeout: float,
        roster: Callable[[], Sequence[Member]],
        meet: Callable[[Sequence[Member]], object],
        put_out: Callable[[str], object],
        given_up: Callable[[int], bool],
        *,
        tell: Probe = probe,
        pace: Pace = DEFAULT_PACE,
    ) -> None:
        self._me = group.me
        self._store = group.store
        self._timeout = timeout
        self._roster = roster
        self._meet = meet
        self._put_out = put_out
        self._given_up = given_up
        self._tell = tell
        self._pace = pace
        self._places = {group.place}
        self._lost = False
        self._dead: dict[int, int] = {}
        self._may_live: set[int] = set()  # of those
        self._check_at, self._check_pause = math.inf, _SLOW_SECONDS
        self._orders: queue.SimpleQueue[Loss | None] = queue.SimpleQueue()
        self._waiting = Waiting(timeout)
        self._leaving = False
        self._left = threading.Event()
        self._has_left = False
        self._thread = threading.Thread(target=self._run, name="farcall-keeper", daemon=True)
        store = self._store
        atexit.register(lambda: store)  # which this process may serve, and others need until it ends

    def start(self) -> None:
        """This worker takes part in the group."""
        self._thread.start()

    def worker_gone(self, loss: Loss) -> None:
        """A member is gone. From any thread; never blocks."""
        self._orders.put(loss)

    @protected
    def leave(self, timeout: float = 2.0) -> bool:
        """Have later joiners not look for this worker, and end; returns whether the store took it in time."""
        self._leaving = True
        self._waiting.abandon()
        self._orders.put(None)
        if self._thread.ident is None:
            self._thread.start()
        return _wait(self._left, timeout) and self._has_left

    def abandon_after_fork(self) -> None:
        """In a forked child: let go of what is the parent's."""
        self._store.forget_line()

    def _run(self) -> None:
        pause, complaint = _SLOW_SECONDS, ""
        while not self._leaving:
            try:
                self._look()
                complaint = ""
            except StoreLost:
                self._note_loss()
            except Abandoned:
                break
            except RendezvousError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    logger.warning("newcomers cannot join the group of '%s': %s", self._me.name, error)
            except Exception as error:
                if repr(error) != complaint:
                    complaint = repr(error)
                    logger.exception("the keeper of worker '%s' failed", self._me.name)
            quick = self._wait(pause) or (self._dead and not complaint)
            pause = _QUICK_SECONDS if quick else min(2 * pause, _SLOW_SECONDS)
        try:
            if not self._lost:
                log = Log(self._store)
                for place in self._places:
                    log.remove(place)
                self._has_left = True
        except StoreLost:
            pass
        finally:
            self._store.forget_line()
            self._left.set()

    def _wait(self, seconds: float) -> bool:
        """Returns whether a member was lost meanwhile."""
        try:
            loss = self._orders.get(timeout=seconds)
        except queue.Empty:
            return False
        if loss is None:
            return True
        if not loss.gave_up:  # else that one takes this one out
            self._dead[loss.incarnation] = _LOOKS_AT_THE_DEAD
            if loss.may_live:
                self._may_live.add(loss.incarnation)
        if loss.may_live or loss.gave_up:
            self._check_at, self._check_pause = time.monotonic(), _SLOW_SECONDS
        return True

    def _look(self) -> None:
        if self._lost or self._store.seems_lost():
            self._come_back()
        elif self._dead or time.monotonic() >= self._check_at:
            log = Log(self._store)
            if self._is_in(log):
                self._strike_out(log)

    def _is_in(self, log: Log) -> bool:
        """Whether this worker is still in the log, if it has reason to doubt that; leaves if it is not."""
        if self._check_at == math.inf:
            return True
        if any(log.is_out(place, self._me.incarnation) for place in self._places):
            self._go("others had lost it, and have taken it out of the group")
            return False
        self._check_at = time.monotonic() + self._check_pause
        self._check_pause = min(2 * self._check_pause, _RARELY_SECONDS)
        return True

    def _go(self, why: str) -> None:
        """Another part of the group, which does not know this worker any more, is the group."""
        self._leaving = True
        reason = (
            f"worker '{self._me.name}' is out of its group: {why}. It must start again to take part in it"
        )
        logger.error("%s", reason)
        self._put_out(reason)

    def _come_back(self) -> None:
        self._note_loss()
        description, name = self._store.description, self._me.name
        if self._store.opener is None:
            self._store.forget_line()
            self._leaving = True
            logger.warning(
                "%s is lost. The group of '%s' goes on, and nobody can join it any more: the store was "
                "passed as an object, so that it cannot be opened again.",
                description,
                name,
            )
            return
        self._waiting = Waiting(self._timeout)
        if self._leaving:
            raise Abandoned
        self._store.reopen(self._waiting)
        log = Log(self._store)
        if not self._is_in(log):
            self._lost = False
            return
        # The first one speaks for all that it knows: others may be slow, and their names are theirs.
        first = self._store.add("kept", 1) == 1
        whom = self._roster() if first else [self._me]
        joining = Joining(self._store, Arrival.of(self._me, 0), self._waiting, self._tell, self._pace)
        found = joining.come_back(log, whom)
        self._places = set(log.places(self._me.incarnation))
        self._lost = False
        rivals = [
            each for each in found if self._given_up(each.incarnation) and self._tell(each) is not False
        ]
        if any(min(log.places(each.incarnation)) < min(self._places) for each in rivals):
            self._go(
                f"it has lost {', '.join(repr(each.name) for each in rivals)}, and the group goes on there"
            )
            return
        self._dead |= dict.fromkeys((each.incarnation for each in rivals), 1)
        self._may_live |= {each.incarnation for each in rivals}
        logger.info("newcomers find the group of '%s' at %s again", name, description)
        self._meet(found)

    def _note_loss(self) -> None:
        if not self._lost:
            self._lost = True
            logger.info(
                "%s is gone; the group of '%s' goes on, and newcomers wait until a member serves it again",
                self._store.description,
                self._me.name,
            )

    def _strike_out(self, log: Log) -> None:
        """Take the dead out of the log, and the lost, if that is up to this worker."""
        here = [member.id for member in self._roster()]
        if min(here) != self._me.id:
            self._dead.clear()
            self._may_live.clear()
            return
        entries = {
            each.arrival.member.incarnation: each.arrival.member for each in log.read() if each.arrival
        }
        left = [each for each in entries if each not in self._dead and self._given_up(each)]
        self._dead |= dict.fromkeys(left, 1)
        if self._check_pause >= _RARELY_SECONDS:  # who was to part with them has had the time
            self._may_live |= set(left)
        # In the order of ids, as whoever takes this one out: of two, one stops before it goes on to others.
        for incarnation in sorted(self._dead, key=lambda each: entries[each].id if each in entries else -1):
            alive = incarnation in entries and self._tell(entries[incarnation]) is not False
            if alive and self._dead[incarnation] > 1:
                self._dead[incarnation] -= 1
                continue
            del self._dead[incarnation]
            if alive and incarnation not in self._may_live:
                continue
            if alive and not log.may_take_out(self._me.incarnation, incarnation):
                self._dead.clear()  # that one takes this one out, and the rest is up to it
                self._may_live.clear()
                break
            self._may_live.discard(incarnation)
            for place in log.places(incarnation):
                log.remove(place)
        log.trim()


@interruptible
def _wait(event: threading.Event, timeout: float) -> bool:
    return event.wait(timeout)

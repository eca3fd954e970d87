"""Messages between the launchers of a job, through the store in which their workers meet, too.

The launcher on the machine at ``--rdzv`` serves the store and is the coordinator. It writes its identity, the
launchers by rank, its orders, and its heartbeat there. The others write their arrival, their reports, and
their heartbeats. Each reads several times a second, on a thread of its own; none blocks in the store.

With a token in the environment, records are sealed with it, so that no other process can give orders;
``records`` has what happens to those of other processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from farcall.launch.job import Job
from farcall.launch.records import (
    Arrivals,
    Heard,
    Notice,
    Post,
    Quiet,
    Records,
    Unreadable,
    keep,
    read,
    unpacked,
)
from farcall.launch.rounds import (
    SILENT_SECONDS,
    Coordinator,
    Kind,
    Launcher,
    Order,
    Report,
    State,
    placed,
)
from farcall.launch.terminal import say
from farcall.observe.format.jobs import job_id
from rpc.errors import RpcError
from rpc.options import AgentOptions
from rpc.rendezvous.address import is_loopback, loopback_remark
from rpc.rendezvous.init_method import ServedTCPStore, open_store
from rpc.rendezvous.store import Abandoned, SharedStore, StoreLost, StoreWait
from rpc.rendezvous.token import WAYS, Credential, find_credential
from rpc.runtime.legible import legible
from rpc.runtime.notices import Notices
from rpc.transport.authentication import ForeignRecordError

__all__ = ["Link", "Lost", "Plan"]

_LOOK_SECONDS: Final = 0.2
_MARGIN_SECONDS: Final = 2 * SILENT_SECONDS
"""Time in seconds that a launcher has to stop, beyond its workers' grace period."""

_DOUBT_SECONDS: Final = 2.0
_DOUBT_LOOK_SECONDS: Final = 0.02
"""Time in seconds for which only records are found that refuse this launcher, until they are believed, and
between two looks meanwhile: anyone can write one with another token, or those of an earlier run again. The
coordinator overwrites them.
"""

_NOTE_BYTES: Final = 1000
_MAX_REFUSED: Final = 20
"""Maximum number of refused launchers that are named in the log."""


class Lost(Exception):
    """This launcher has no part in the job, or no longer; the text has the reason."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The place of this machine's workers in the job.

    Attributes:
        me: this launcher.
        world_size: number of workers on all machines.
        nodes: number of machines.
        place: HOST:PORT of the store.
        job_id: name of the job for observers: the same on all machines, and different for each job.
    """

    me: Launcher
    world_size: int
    nodes: int
    place: str
    job_id: str


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of a job, as its coordinator announces it in the store.

    Attributes:
        board: prefix of its records; a random name.
        job: name of the job.
        coordinator: the launcher that gives the orders.
    """

    board: str
    job: str
    coordinator: Launcher

    def pack(self) -> bytes:
        """Return a record for the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> _Run:
        """Parse a record."""
        found = json.loads(packed)
        return cls(str(found["board"]), str(found["job"]), Launcher(**found["coordinator"]))


class Link:
    """One launcher's end of the messages.

    Args:
        job: the job.
        news: receives the ``Plan``, then each ``Order``; and ``Lost`` if this launcher has no part any more.
    """

    def __init__(self, job: Job, news: queue.SimpleQueue[Any]) -> None:
        self._job = job
        self._news = news
        self._environ = dict(os.environ)
        self._report = Report(State.WAITING)
        self._wake = threading.Event()
        self._waiting = StoreWait(job.timeout)
        self._exchanged_at: float | None = None
        self._quiet = Quiet()
        self._refused: list[str] = []
        self._doubt = ("", 0.0)
        self._notice = Notice(job.rdzv)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farcall-link", daemon=True)
        self._thread.start()

    def report(self, report: Report) -> None:
        """Report to the coordinator. From any thread."""
        self._report = report
        self._wake.set()

    @property
    def is_stuck(self) -> bool:
        """Whether the store has not answered for long, which may happen without an error. To be called
        repeatedly, by one thread.
        """
        seconds = self._quiet.look(self._exchanged_at)
        return self.is_placed and not self.is_over and seconds > SILENT_SECONDS

    @property
    def is_placed(self) -> bool:
        """Whether this launcher is one of the job's."""
        return self._exchanged_at is not None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to send or to receive."""
        return self._over.is_set()

    def close(self, seconds: float) -> bool:
        """Send and receive nothing more.

        Returns:
            Whether no thread uses the store any more.
        """
        self._waiting.abandon()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # ---- on the link's thread

    def _run(self) -> None:
        try:
            self._take_part()
        except Abandoned:
            pass
        except (Lost, RpcError) as error:
            self._news.put(Lost(str(error)))
        except StoreLost as error:
            self._news.put(Lost(f"the launcher that serves the store at {self._job.rdzv} is gone: {error}"))
        except Exception as error:
            self._news.put(Lost(f"this launcher has failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._over.set()

    def _take_part(self) -> None:
        job = self._job
        host, name = socket.gethostname(), secrets.token_hex(8)
        me = Launcher(0, job.nodes, job.workers, host, os.getpid(), job.node_rank, name=name)
        credential = find_credential(AgentOptions(), self._environ) if job.nodes > 1 else Credential(None)
        # All launchers that meet on loopback are on this host, and have this user's own key.
        token = None if credential.automatic and not is_loopback(_host(job.rdzv)) else credential.token
        rank = 0 if job.nodes == 1 else job.node_rank
        init_method = f"tcp://{job.rdzv or '127.0.0.1:0'}"
        notices = Notices()
        store: SharedStore | None = None
        while True:
            try:
                if store is None:
                    size = None if rank is None else job.nodes
                    store = open_store(init_method, rank, size, timeout=self._waiting.remaining, environ={})
                    store = store.sealed(token).under("launch")
                else:
                    store.reopen(self._waiting)
                if isinstance(store.store, ServedTCPStore):
                    self._coordinate(store, me)
                    return
                if self._follow(store, me):
                    return
                reason = self._doubt[0] or "no launcher of this job serves the store there yet"
            except StoreLost as error:
                if self._exchanged_at is not None:
                    raise
                self._doubt = ("", 0.0)
                reason = str(error)
            if notices.due():
                say(f"waiting at {job.rdzv} for {notices.waited}: {reason}")
            if not self._waiting.pause(_DOUBT_LOOK_SECONDS if self._doubt[0] else _LOOK_SECONDS):
                raise Lost(f"there was no launcher of this job at {job.rdzv} for {job.timeout:g} s: {reason}")

    def _coordinate(self, store: SharedStore, me: Launcher) -> None:
        """Give the orders, until all launchers have left."""
        assert isinstance(store.store, ServedTCPStore)
        job, alone = self._job, self._job.nodes == 1
        run = _Run(secrets.token_hex(8), job.name, me)
        announced, board = run.pack(), store.under(run.board)
        others: dict[int, Heard] = {}
        came, refusal = self._meet(store, board, announced, me, others)
        plan = json.dumps([asdict(each) for each in came]).encode()
        coordinator = Coordinator(came, job.restarts, job.grace + _MARGIN_SECONDS)
        if refusal:
            coordinator.end(refusal, time.monotonic())
        else:
            self._news.put(_plan(me, came, job.rdzv or f"127.0.0.1:{store.store.port}"))
        orders, told, over = Post(board, "order"), None, False
        while not over:
            self._exchanged_at = time.monotonic()
            if told != coordinator.order:
                told = coordinator.order
                self._news.put(told)
            if not alone:
                keep(store, "coordinator", announced)
                keep(board, "plan", plan)
                if orders.keep(told.to_json()):
                    self._tell_of_refused(store)
            self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()
            for each in others.values():
                each.look()
            reports = {index: each.report for index, each in others.items() if each.report is not None}
            silent = {index: each.silent_for for index, each in others.items()}
            over = coordinator.step({**reports, me.index: self._report}, silent, time.monotonic())

    def _meet(
        self,
        store: SharedStore,
        board: SharedStore,
        announced: bytes,
        me: Launcher,
        others: dict[int, Heard],
    ) -> tuple[tuple[Launcher, ...], str]:
        """Return the launchers that make up the job, placed; or those that have come and the reason why they
        are no job.
        """
        job, notices = self._job, Notices()
        arrivals, known, since = Arrivals(board, self._notice), {me.name}, 0.0
        came = {me.index: me}
        while True:
            if self._report.leaves:
                return tuple(came.values()), f"{me} {self._report.leaves}"
            if job.nodes > 1:
                keep(store, "coordinator", announced)
                for each in arrivals.new(known):
                    index, since = len(known), time.monotonic()
                    known.add(each.name)
                    came[index] = replace(each, index=index)
                    others[index] = Heard(board, f"report/{each.name}", self._notice)
                self._tell_of_refused(store)
                for index in list(others):
                    others[index].look()
                    if others[index].has_left:
                        say(f"{came.pop(index)} has left again")
                        del others[index]
            launchers, refusal = placed(list(came.values()))
            if len(came) >= job.nodes and not refusal:
                return launchers, ""
            # None of them has left, so all of them take part.
            if refusal and time.monotonic() - since > SILENT_SECONDS:
                return tuple(came.values()), refusal
            there = f"so far there is {', '.join(map(str, came.values()))}"
            doctor = f"farcall doctor --meet {job.rdzv}"
            if notices.due():
                say(
                    f"waiting at {job.rdzv} for {job.nodes} launchers for {notices.waited}; {there}. If all "
                    f"have been started, `{doctor}` on two machines says what is in the way."
                    f"{loopback_remark(_host(job.rdzv))}"
                )
            if not self._waiting.pause(_LOOK_SECONDS):
                missing = f"not all {job.nodes} launchers have come to {job.rdzv} within {job.timeout:g} s"
                return tuple(came.values()), f"{missing}: {there}.{loopback_remark(_host(job.rdzv))}"

    def _tell_of_refused(self, store: SharedStore) -> None:
        """Log a launcher that has come and is not of this job, as it has noted itself."""
        try:
            note = store.get("refused") or b""
        except ForeignRecordError as error:
            note = error.claimed
        why = legible(note[:_NOTE_BYTES].decode(errors="replace"))
        if why and why not in self._refused and len(self._refused) < _MAX_REFUSED:
            self._refused.append(why)
            say(f"a launcher has come to {self._job.rdzv} and was refused: {why}")

    def _announced(self, store: SharedStore) -> tuple[_Run | None, bool]:
        """Return the run that a coordinator has announced, None if there is none; and whether the record is
        sealed with another token.
        """
        try:
            packed, is_foreign = store.get("coordinator"), False
        except ForeignRecordError as error:
            packed, is_foreign = error.claimed, True
        try:
            return None if packed is None else unpacked(packed, _Run.unpack), is_foreign
        except Unreadable as error:
            self._notice("coordinator", str(error))
            return None, is_foreign

    def _follow(self, store: SharedStore, me: Launcher) -> bool:
        """Follow the orders, until this launcher has left.

        Returns:
            False if there is no coordinator, it is about to end, or it may not be this launcher's.
        """
        run, is_foreign = self._announced(store)
        if run is None:
            self._doubt = ("", 0.0)
            return False
        board, coordinator = store.under(run.board), run.coordinator
        if is_foreign:
            reason = f"the launcher that serves the store has another token than {me}"
            return self._refuse(store, reason, f". {WAYS}")
        if run.job != self._job.name:
            reason = f"{coordinator} is of the job {run.job!r}, {me} of the job {self._job.name!r}"
            return self._refuse(store, f"{reason}. Each needs a port of its own")
        if coordinator.nodes != me.nodes:
            reason = f"{coordinator} was started with --nnodes {coordinator.nodes}, {me} with {me.nodes}"
            return self._refuse(store, reason)
        arrivals, reports = Arrivals(board, self._notice), Post(board, f"report/{me.name}")
        orders = Records(board, "order", Order.from_json, self._notice)
        told, notices, place = None, Notices(), self._job.rdzv
        while True:
            report = self._report
            reports.keep(report.to_json())
            if report.state is State.LEFT:
                return True
            if told is None:
                arrivals.keep(me)
            with contextlib.suppress(Unreadable):  # the order before it holds
                orders.look()
            # The coordinator serves the store: as long as that answers, it is not gone.
            self._exchanged_at = self._exchanged_at and time.monotonic()
            order = orders.said
            if told is None and order is not None:
                launchers = self._launchers(board)
                if launchers is None:
                    order = None
                elif not self._takes_its_place(store, launchers, me, order):
                    return False
            if order is not None and order != told:
                self._exchanged_at, told = time.monotonic(), order
                self._news.put(order)
            if told is None:
                self._doubt = ("", 0.0)
                other, is_foreign = self._announced(store)
                if other not in (None, run) and not is_foreign:
                    return False  # the one that was found before was an earlier run's, written again
                if not self._waiting.remaining:
                    raise Lost(
                        f"not all {me.nodes} launchers have come to {place} within {self._job.timeout:g} s"
                    )
                if notices.due():
                    say(f"waiting at {place} for all launchers for {notices.waited}; {coordinator} is there")
            self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()

    def _launchers(self, board: SharedStore) -> list[Launcher] | None:
        """Return the launchers of the job; None while that is not known."""
        try:
            packed = read(board, "plan")
            if packed is None:
                return None
            return unpacked(packed, lambda plan: [Launcher(**each) for each in json.loads(plan)])
        except Unreadable as error:
            self._notice("plan", str(error))
            return None

    def _takes_its_place(
        self, store: SharedStore, launchers: Sequence[Launcher], me: Launcher, order: Order
    ) -> bool:
        """Find the place of this launcher; false if it has none, or the job at the store is about to end."""
        if not any(each.name == me.name for each in launchers):
            if order.kind is Kind.END:
                return False
            there = ", ".join(map(str, launchers))
            reason = f"the job has its {me.nodes} launchers, {there}; {me} is one too many"
            return self._refuse(store, reason)
        if order.kind is not Kind.END:
            self._news.put(_plan(me, launchers, self._job.rdzv))
        return True

    def _refuse(self, store: SharedStore, reason: str, advice: str = "") -> bool:
        """Refuse: this launcher is not of the job at the store, and notifies the coordinator there. Returns
        False while nothing has been found for so long but what says that.
        """
        now, (doubt, since) = time.monotonic(), self._doubt
        if doubt != reason:
            self._doubt = (reason, now)
        elif now - since > _DOUBT_SECONDS:
            store.set("refused", reason.encode())
            raise Lost(f"refused at {self._job.rdzv}: {reason}{advice}")
        return False


def _plan(me: Launcher, launchers: Sequence[Launcher], place: str) -> Plan:
    mine = next(each for each in launchers if each.name == me.name)
    coordinator = min(launchers, key=lambda each: each.index)
    name = job_id(place, coordinator.host, coordinator.pid)
    return Plan(mine, sum(each.workers for each in launchers), len(launchers), place, name)


def _host(place: str) -> str:
    return place.rpartition(":")[0].strip("[]")

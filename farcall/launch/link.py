"""Messages between the launchers of a job, through the store in which their workers meet, too.

The launcher on the machine at ``--rdzv`` serves the store and is the coordinator. It writes its identity, the
launchers by rank, its orders, and its heartbeat there. The others write their arrival, their reports, and
their heartbeats. Each reads several times a second, on a thread of its own; none blocks in the store.

With a token in the environment, records are sealed with it, so that no other process can give orders.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NoReturn

from farcall.launch.job import Job
from farcall.launch.liveness import Heard, Quiet
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
from farcall.observe.jobs import job_id
from rpc.errors import RpcError
from rpc.group.authentication import ForeignRecordError
from rpc.group.handshake import legible
from rpc.options import AgentOptions
from rpc.rendezvous.address import loopback_remark
from rpc.rendezvous.init_method import ServedTCPStore, open_store
from rpc.rendezvous.store import Abandoned, SharedStore, StoreLost, StoreWait
from rpc.rendezvous.token import WAYS, Credential, find_credential
from rpc.runtime.notices import Notices

__all__ = ["Link", "Lost", "Plan"]

_LOOK_SECONDS: Final = 0.2
_BEAT_SECONDS: Final = 1.0
_MARGIN_SECONDS: Final = 2 * SILENT_SECONDS
"""Time in seconds that a launcher has to stop, beyond its workers' grace period."""


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
        self._refused = b""
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
        me = Launcher(0, job.nodes, job.workers, socket.gethostname(), os.getpid(), job.node_rank)
        credential = find_credential(AgentOptions(), self._environ) if job.nodes > 1 else Credential(None)
        token = None if credential.automatic else credential.token
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
                reason = "no launcher of this job serves the store there yet"
            except ForeignRecordError as error:
                assert store is not None
                reason = f"the launcher that serves the store has another token than {me}"
                store.set("refused", reason.encode())
                raise Lost(f"refused at {job.rdzv}: {reason}. {WAYS}") from error
            except StoreLost as error:
                if self._exchanged_at is not None:
                    raise
                reason = str(error)
            if notices.due():
                say(f"waiting at {job.rdzv} for {notices.waited}: {reason}")
            if not self._waiting.pause(_LOOK_SECONDS):
                raise Lost(f"there was no launcher of this job at {job.rdzv} for {job.timeout:g} s: {reason}")

    def _coordinate(self, store: SharedStore, me: Launcher) -> None:
        """Give the orders, until all launchers have left."""
        assert isinstance(store.store, ServedTCPStore)
        job, alone = self._job, self._job.nodes == 1
        board = store.under(name := secrets.token_hex(8))
        if not alone:
            about = {"board": name, "job": job.name, **asdict(me)}
            store.set("coordinator", json.dumps(about).encode())
        others: dict[int, Heard] = {}
        came, refusal = self._meet(store, board, me, others)
        if not alone:
            board.set("plan", json.dumps([asdict(each) for each in came]).encode())
        coordinator = Coordinator(came, job.restarts, job.grace + _MARGIN_SECONDS)
        if refusal:
            coordinator.end(refusal, time.monotonic())
        else:
            self._news.put(_plan(me, came, job.rdzv or f"127.0.0.1:{store.store.port}"))
        told: Order | None = None
        beat, beat_at, over = 0, 0.0, False
        while not over:
            now = self._exchanged_at = time.monotonic()
            if told != coordinator.order:
                told, beat_at = coordinator.order, 0.0
                self._news.put(told)
            if not alone and now >= beat_at:
                beat, beat_at = beat + 1, now + _BEAT_SECONDS
                board.set("order", json.dumps({"beat": beat, "said": told.to_json()}).encode())
                self._tell_of_refused(store)
            self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()
            for index, each in others.items():
                each.hear(board.get(f"report/{index}"))
            reports = {index: Report.from_json(each.said) for index, each in others.items() if each.said}
            silent = {index: each.silent_for for index, each in others.items()}
            over = coordinator.step({**reports, me.index: self._report}, silent, time.monotonic())

    def _meet(
        self, store: SharedStore, board: SharedStore, me: Launcher, others: dict[int, Heard]
    ) -> tuple[tuple[Launcher, ...], str]:
        """Return the launchers that make up the job, placed; or those that have come and the reason why they
        are no job.
        """
        job, notices = self._job, Notices()
        came, arrivals, since = {me.index: me}, 0, 0.0
        while True:
            if self._report.leaves:
                return tuple(came.values()), f"{me} {self._report.leaves}"
            if job.nodes > 1:
                if (packed := board.get(f"launcher/{arrivals + 1}")) is not None:
                    arrivals, since = arrivals + 1, time.monotonic()
                    came[arrivals], others[arrivals] = Launcher.unpack(packed), Heard()
                    continue
                self._tell_of_refused(store)
                for index in list(others):
                    others[index].hear(board.get(f"report/{index}"))
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
        if note != self._refused:
            self._refused = note
            why = legible(note.decode(errors="replace"))
            say(f"a launcher has come to {self._job.rdzv} and was refused: {why}")

    def _follow(self, store: SharedStore, me: Launcher) -> bool:
        """Follow the orders, until this launcher has left.

        Returns:
            False if there is no coordinator, or it is about to end.
        """
        packed = store.get("coordinator")
        if packed is None:
            return False
        found = json.loads(packed)
        board, name = store.under(found.pop("board")), found.pop("job")
        coordinator = Launcher(**found)
        if name != self._job.name:
            self._refuse(
                store,
                f"{coordinator} is of the job {name!r}, {me} of the job {self._job.name!r}. "
                "Each needs a port of its own",
            )
        if coordinator.nodes != me.nodes:
            self._refuse(
                store, f"{coordinator} was started with --nnodes {coordinator.nodes}, {me} with {me.nodes}"
            )
        me = replace(me, index=board.add("arrivals", 1))
        board.set(f"launcher/{me.index}", me.pack())
        heard, told, notices, place = Heard(), None, Notices(), self._job.rdzv
        sent, beat, beat_at = None, 0, 0.0
        while True:
            report, now = self._report, time.monotonic()
            if report is not sent or now >= beat_at:
                sent, beat, beat_at = report, beat + 1, now + _BEAT_SECONDS
                board.set(f"report/{me.index}", json.dumps({"beat": beat, "said": report.to_json()}).encode())
            if report.state is State.LEFT:
                return True
            heard.hear(board.get("order"))
            if heard.said:
                order = Order.from_json(heard.said)
                if told is None and not self._takes_its_place(store, board, me, order):
                    return False
                self._exchanged_at = time.monotonic()
                if order != told:
                    told = order
                    self._news.put(order)
                if heard.silent_for > SILENT_SECONDS:
                    raise Lost(
                        f"{coordinator} is gone: nothing has been heard of it for {SILENT_SECONDS:g} s"
                    )
            elif not self._waiting.remaining:
                raise Lost(
                    f"not all {me.nodes} launchers have come to {place} within {self._job.timeout:g} s"
                )
            elif notices.due():
                say(f"waiting at {place} for all launchers for {notices.waited}; {coordinator} is there")
            self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()

    def _takes_its_place(self, store: SharedStore, board: SharedStore, me: Launcher, order: Order) -> bool:
        """Find the place of this launcher; false if the job at the store is about to end."""
        launchers = [Launcher(**each) for each in json.loads(board.get("plan") or b"[]")]
        if not any(each.index == me.index for each in launchers):
            if order.kind is Kind.END:
                return False
            there = ", ".join(map(str, launchers))
            self._refuse(store, f"the job has its {me.nodes} launchers, {there}; {me} is one too many")
        if order.kind is not Kind.END:
            self._news.put(_plan(me, launchers, self._job.rdzv))
        return True

    def _refuse(self, store: SharedStore, reason: str) -> NoReturn:
        """Refuse: this launcher is not of the job at the store, and notifies the coordinator there."""
        store.set("refused", reason.encode())
        raise Lost(f"refused at {self._job.rdzv}: {reason}")


def _plan(me: Launcher, launchers: Sequence[Launcher], place: str) -> Plan:
    mine = next(each for each in launchers if each.index == me.index)
    coordinator = min(launchers, key=lambda each: each.index)
    name = job_id(place, coordinator.host, coordinator.pid)
    return Plan(mine, sum(each.workers for each in launchers), len(launchers), place, name)


def _host(place: str) -> str:
    return place.rpartition(":")[0].strip("[]")

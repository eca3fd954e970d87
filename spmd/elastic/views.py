"""Carries out what ``agreement`` decides: asks members, forms their groups, and notices losses.

Locks: ``changed`` guards the member's part of the protocol; no call is made and no group is formed while it
is held.
Threads: losses are noted on the agent's loop and taken in by others; members are asked on executor threads; a
thread of this job's own proposes views. The training thread prepares, counts votes, and waits for outcomes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from time import monotonic
from typing import Any, Final

from rpc.agent.futures import Future
from rpc.api import get_worker_info, get_worker_infos, rpc_async
from rpc.errors import GivenUpError, MessageLostError, RendezvousError, RpcError, WorkerLostError
from rpc.group.peer import Peer
from rpc.rendezvous.log import Log
from rpc.rendezvous.store import SharedStore
from rpc.runtime.current import current_agent
from spmd.collectives import torch_internals
from spmd.collectives.group import Group
from spmd.collectives.node import Node
from spmd.collectives.process_group import FarcallProcessGroup
from spmd.elastic.agreement import (
    NEW,
    Ballot,
    Member,
    Outcome,
    OutdatedError,
    Plan,
    Proposal,
    Report,
    View,
)
from spmd.elastic.errors import (
    ElasticError,
    Finished,
    JobMismatchError,
    PutOut,
    StateLostError,
    StepFailedError,
)

__all__ = ["EXTENSION", "Views"]

logger = logging.getLogger(__name__)

EXTENSION: Final = "spmd.elastic"
_FINISHED: Final = "elastic/finished"

_ASK_SECONDS: Final = 0.1
"""Interval at which a newcomer asks the other workers."""

_RETRY_SECONDS: Final = 0.05
_LOG_SECONDS: Final = 0.5
"""Interval at which the group's log is read while this member may not go on."""

_CALL_SECONDS: Final = 120.0
_FORM_SECONDS: Final = 60.0

_STOPPED_SECONDS: Final = 8.0
"""A pause of the agent's loop after which this process may have been excluded unnoticed."""

_NOTICE_SECONDS: Final = 12.0
"""Time in which workers that are cut off must have noticed it, or have paused for longer than the above."""

_PATIENCE_SECONDS: Final = 25.0
"""Time in which the group's log decides about lost members; a member that may not go on then gives up."""

_EXITING: Final = 0x4  # PF_EXITING, in /proc/PID/stat
_STATE, _FLAGS, _START = 0, 6, 19  # fields behind the name (proc(5))


class Views:
    """One member of the job of its agent's group, and its view. From any thread.

    Args:
        description: describes the job; the same text on all members.
        min_size: minimum number of members of the first view.
        state: returns this member's state, given the step of the attempt that newcomers observe.

    Attributes:
        core: this member's part of the protocol.
        changed: its lock; notified when an outcome or another view is there.
        group: the process group of the view.
        outcome: how the last attempt has ended; None while one is under way.
        given_step: the step that the training thread tries: newcomers may load its state.
        error: why the job has ended for this member, or None.
        closed: whether it has left.
    """

    def __init__(self, description: str, min_size: int, state: Callable[[], Any]) -> None:
        self._agent: Any = current_agent()
        self.me: int = self._agent.incarnation
        self.name = get_worker_info().name
        self.core = Member(self.me)
        self.changed = threading.Condition(threading.RLock())
        self.group: FarcallProcessGroup | None = None
        self.outcome: Outcome | None = Outcome.ABORT
        self.given_step = NEW
        self.error: BaseException | None = None
        self.closed = False
        self._description, self._min_size, self._state = description, min_size, state
        self._newcomers: dict[int, tuple[int, int]] = {}  # by incarnation: order of founders
        self._key = (get_worker_info().id, self.me)
        self._is_member = False
        self._released = threading.Event()
        self._wake = threading.Event()
        self._suspected: Ballot | None = None
        self._blocked_since: float | None = None
        self._gone: queue.SimpleQueue[tuple[int, bool] | None] = queue.SimpleQueue()
        self._processes: dict[int, tuple[int, int]] = {}
        self._tick = monotonic()
        self._keeper: Any = self._agent.extensions.get("rpc.keeper")
        if self._agent.is_static_group or self._keeper is None:
            raise ElasticError(
                "an elastic job needs a dynamic group, whose workers join and leave: start the workers with "
                "`farcall launch --dynamic`, or call init_rpc without a world_size"
            )
        if EXTENSION in self._agent.extensions:
            raise ElasticError(
                "there is an elastic job in this process already: leave it before another join"
            )
        torch_internals.prepare()

    # ---- joining, and the end

    def join(self, timeout: float) -> None:
        """Become a member of the job's next view, or found the job.

        Raises:
            Finished: the job has ended.
            JobMismatchError: other members have another description.
            ElasticError: fewer than ``min_size`` workers have come in time.
        """
        self._check_store()
        hooks = self._agent.lifecycle.hooks
        hooks.gone.append(self._note)
        hooks.close.append(self.close)
        self._agent.extensions[EXTENSION] = self
        self._agent.group.on_loop(self._beat)
        threading.Thread(target=self._watch, name="farcall-elastic", daemon=True).start()
        try:
            self._enter(monotonic() + timeout)
        except BaseException:
            self.close()
            raise
        self.check_ended()

    def check_ended(self) -> None:
        """Leave and raise ``Finished`` if this worker has come into the view of a job that has ended: it gets
        no state there.
        """
        with self.changed:
            has_come_too_late = self.error is None and self.core.ended and self.core.step == NEW
        if has_come_too_late:
            self.leave(_CALL_SECONDS)
            raise self._finished(self._steps())

    def _steps(self) -> int:
        """Return the number of steps that the job has committed, as far as this worker knows."""
        view = self.core.view
        return self.core.step if self.core.step != NEW or view is None else view.first

    def _check_store(self) -> None:
        found = self._on_store(lambda store: store.get(_FINISHED))
        if found is not None:
            raise self._finished(int(found))

    def _enter(self, deadline: float) -> None:
        lost_since: dict[int, float] = {}
        while True:
            answers = self._hello()
            if answers is not None:
                self._check_store()  # the last member tells the store first
            with self.changed:
                self._take_in()
                may_found = answers is not None and self._may_found(lost_since)
            may_found = may_found and not self._misses_present_workers()
            with self.changed:
                self._take_in()
                if self._has_view():
                    return
                if may_found and self._may_found(lost_since):
                    self._is_member, self.core.step = True, 0
                    logger.info("worker '%s' founds the elastic job", self.name)
                    self._wake.set()
                    self.changed.wait_for(lambda: self._has_view() or self.error, _FORM_SECONDS)
                if self.error is not None:
                    raise self.error
                if self._has_view():
                    return
                self.changed.wait(_ASK_SECONDS)
            if monotonic() > deadline:
                raise ElasticError(
                    f"worker '{self.name}' has not become a member of the elastic job in time: "
                    f"{1 + len(self._newcomers)} workers have come, min_size is {self._min_size}"
                )

    def _may_found(self, lost_since: dict[int, float]) -> bool:
        """Whether this worker founds the job if there is none; with ``changed`` held.

        Args:
            lost_since: when newcomers were first found to be lost.
        """
        known = self._newcomers
        smaller = [each for each in known if known[each] < self._key]
        for each in [each for each in smaller if self._is_lost(each)]:
            # It may live, and have founded the job: then one of the two is put out of the group.
            since = lost_since.setdefault(each, monotonic())
            if each in self.core.dead or monotonic() - since > _PATIENCE_SECONDS / 2:
                del known[each]
        is_first = not any(each in known for each in smaller)
        is_asked = bool(self.core.tried) or not self._is_lost(self.core.ballot[1])  # by a member of a job
        size = 1 + sum(not self._is_lost(each) for each in known)
        return is_first and not is_asked and size >= self._min_size

    def _misses_present_workers(self) -> bool:
        """Whether this worker has lost one that is still in the group's log: it may be a member of a job."""
        present: set[int] = self._on_store(lambda store: _present(Log(store)))
        with self.changed:
            self._take_in()
            return any(self._is_lost(each) for each in present - self.core.dead)

    def _has_view(self) -> bool:
        return self.core.view is not None

    def _hello(self) -> bool | None:
        """Tell all workers that this one wants to take part; True if there is no job yet, as far as all
        know, else None.
        """
        calls = []
        complete = True
        for info in get_worker_infos():
            if info.name != self.name:
                with contextlib.suppress(RpcError):
                    calls.append(
                        rpc_async(info, _hello, args=(self.me, self._key, self._description), timeout=10)
                    )
        for call in calls:
            try:
                status, incarnation, key = call.wait()
            except JobMismatchError:
                raise
            except WorkerLostError:
                continue
            except RpcError as error:
                logger.debug("a worker does not say whether it is a member: %s", error)
                complete = False
                continue
            if isinstance(status, int):
                raise self._finished(status)
            complete = complete and status != "member"
            if status == "candidate":
                with self.changed:
                    self._newcomers.setdefault(incarnation, (key[0], key[1]))
                    self._watch_processes([incarnation])
        return True if complete else None

    def greeted(
        self, incarnation: int, key: tuple[int, int], description: str
    ) -> tuple[Any, int, tuple[int, int]]:
        """Answer a worker that wants to take part."""
        if description != self._description:
            raise JobMismatchError(
                f"worker '{self.name}' has another job: {_difference(self._description, description)}. "
                "All members need the same model, optimizer, sampler and options"
            )
        with self.changed:
            if self.core.ended:
                return self._steps(), self.me, self._key
            if self.core.left:
                raise GivenUpError(f"worker '{self.name}' is leaving the elastic job")
            if self.core.view is None or incarnation not in self.core.view.members:
                self._newcomers[incarnation] = (key[0], key[1])
                self._watch_processes([incarnation])
            self.changed.notify_all()
            self._wake.set()
            return ("member" if self._is_member else "candidate"), self.me, self._key

    def leave(self, timeout: float) -> None:
        """Leave the job, outside of an attempt, and wait until the others go on without this member."""
        with self.changed:
            if self.closed:
                return
            self.core.left = True
        self.suspect()
        deadline = monotonic() + timeout
        while not self._released.wait(_RETRY_SECONDS) and monotonic() < deadline:
            with self.changed:
                self._take_in()
                if self.error is not None or all(map(self._is_lost, self.core.partners())):
                    break
            self._wake.set()
        with self.changed:
            is_last = self.core.step != NEW and self.core.partners() <= self.core.dead
            self.core.ended = self.core.ended or (is_last and self.error is None)
        if self.core.ended:
            self._publish_end(self._steps())
        self.close()

    def _publish_end(self, step: int) -> None:
        with contextlib.suppress(RpcError):  # the store is gone, and with it the way for newcomers
            self._on_store(lambda store: store.set(_FINISHED, str(step).encode()))

    def close(self) -> None:
        """Leave at once. Idempotent."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
            group, self.group = self.group, None
            self.changed.notify_all()
        self._wake.set()
        self._released.set()
        hooks = self._agent.lifecycle.hooks
        for handlers, mine in ((hooks.gone, self._note), (hooks.close, self.close)):
            with contextlib.suppress(ValueError):
                handlers.remove(mine)
        if self._agent.extensions.get(EXTENSION) is self:
            del self._agent.extensions[EXTENSION]
        if group is not None:
            group.shutdown()

    def fail(self, error: ElasticError, *, tell: str | None = None) -> None:
        """End the job here, with an error; with ``tell`` on all members."""
        with self.changed:
            if self.error is not None or self.closed:
                return
            self.error = error
            group = self.group
            others = [each for each in self.core.partners() if not self._is_lost(each)]
            self.changed.notify_all()
        self._released.set()
        if tell is not None:
            self._ask(others, _failed, self.name, tell, timeout=10.0)
        if group is not None and not group.group.members.failed:
            group.group.abort("the job has failed")

    def _finished(self, step: int) -> Finished:
        return Finished(
            f"the elastic job has ended after {step} steps: there is nothing to do for worker '{self.name}'",
            step,
        )

    # ---- who is gone

    def _note(self, peer: Peer, reason: str) -> None:
        """Note a loss: called on the loop's thread, where it must be judged whether it is certain."""
        process = self._processes.get(peer.incarnation)
        paused = monotonic() - self._tick > _STOPPED_SECONDS
        if paused:
            self._gone.put(None)
        certain = peer.has_left or (process is not None and _has_ended(*process))
        self._gone.put((peer.incarnation, certain and not paused))
        if f"'{self.name}' is out of its group" in reason:
            error = PutOut(f"{reason}; the elastic job may go on without it")
            threading.Thread(target=self.fail, args=(error,), daemon=True).start()
        self._wake.set()

    def _beat(self) -> None:
        """Notice pauses of this process, on the loop's thread."""
        now = monotonic()
        if now - self._tick > _STOPPED_SECONDS:
            self._gone.put(None)
        self._tick = now
        if not self.closed:
            self._agent.group.connections.loop.call_later(1.0, self._beat)

    def _take_in(self) -> None:
        """Take in losses; with ``changed`` held."""
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._gone.get_nowait()
                if event is None:
                    self.core.was_stopped()
                elif event[1]:
                    self.core.witnessed(event[0])

    def _peer(self, incarnation: int) -> Peer | None:
        peer: Peer | None = self._agent.group.peers.by_incarnation(incarnation)
        return peer

    def _is_lost(self, incarnation: int) -> bool:
        if incarnation == self.me:
            return False
        peer = self._peer(incarnation)
        return peer is None or peer.lost is not None

    def _watch_processes(self, members: Iterable[int]) -> None:
        """Remember the processes of members on this host, whose ends the kernel tells."""
        own_host = self._agent.group.peers.own.member.host
        for each in members:
            peer = self._peer(each)
            if peer is not None and peer.member.host == own_host and peer.link.process is not None:
                fields = _stat(peer.link.process)
                if fields is not None and each not in self._processes:
                    self._processes[each] = peer.link.process, int(fields[_START])

    def _on_store(self, work: Callable[[SharedStore], Any]) -> Any:
        deadline = monotonic() + self._agent.options.rendezvous_timeout
        while True:
            try:
                return self._keeper.ask(work).result(timeout=max(0.0, deadline - monotonic()))
            except (TimeoutError, RendezvousError) as error:  # another worker may serve it soon
                if monotonic() > deadline or self.closed:
                    raise ElasticError(f"worker '{self.name}': the group's store does not answer") from error
            self._released.wait(_LOG_SECONDS)

    def _read_log(self) -> None:
        """Read from the group's log who was removed while this worker was in it."""
        wanted = [each for each in self.core.partners() if self._is_lost(each)]

        def read(store: SharedStore) -> list[int]:
            removed = set(wanted) - _present(Log(store))
            return sorted(removed) if self.me in _present(Log(store)) else []

        with contextlib.suppress(RpcError):
            removed = self._on_store(read)
            with self.changed:
                self.core.was_removed(removed)

    # ---- proposing views

    def wake(self) -> None:
        """Have the thread that proposes views look again."""
        self._wake.set()

    def suspect(self) -> None:
        """Record that the group of the view has failed, or a member is gone; a view change follows."""
        with self.changed:
            if self.core.view is not None:
                self._suspected = self.core.view.ballot
        self._wake.set()

    def _proposer(self) -> int | None:
        """Return the member that proposes the next view, as far as this one knows; with ``changed`` held."""
        core = self.core
        if core.view is None and not core.tried and core.step == NEW:
            return None
        order: Sequence[int] = sorted(core.partners() | {self.me}) if core.view is None else core.view.members
        return next((each for each in order if not self._is_lost(each)), None)

    def wants_to_grow(self) -> bool:
        """Whether this member's vote should ask for a view with newcomers; with ``changed`` held."""
        return self._proposer() == self.me and any(not self._is_lost(each) for each in self._newcomers)

    def _is_due(self) -> bool:
        core = self.core
        if core.view is None:
            return core.step != NEW or bool(core.tried)
        waits = len(core.view.members) < self._min_size and any(
            not self._is_lost(each) for each in self._newcomers
        )
        return (
            core.frozen or core.hold or core.left or waits
            or self._suspected == core.view.ballot
            or any(map(self._is_lost, core.partners()))
        )  # fmt: skip

    def _has_left(self) -> bool:
        return self.closed

    def _watch(self) -> None:
        pause = 1.0
        while not self._has_left():
            self._wake.wait(pause)
            self._wake.clear()
            pause = 1.0
            with self.changed:
                self._take_in()
                if self._has_left() or self.error is not None or not self._is_due():
                    continue
                proposer = self._proposer()
                suspected = self._suspected
            try:
                if proposer == self.me:
                    if not self._change():
                        pause = _RETRY_SECONDS * (1 + secrets.randbelow(3))
                elif proposer is not None:
                    pause = 0.5
                    if suspected is not None:
                        self._ask([proposer], _poke, suspected, timeout=5.0)
            except Exception:
                if not self._has_left() and not self._agent.lifecycle.closed:
                    logger.exception("worker '%s' could not change the view of the elastic job", self.name)
                pause = 1.0

    def _change(self) -> bool:
        """Propose a view; returns whether it was formed, or none is needed."""
        with self.changed:
            self._take_in()
            proposal = Proposal(self.core, [each for each in self._newcomers if not self._is_lost(each)])
            partners = self.core.partners()
        while missing := {each for each in proposal.to_ask(()) if not self._is_lost(each)}:
            for each, answer in self._ask(missing, _freeze, proposal.ballot).items():
                if isinstance(answer, Report):
                    proposal.take(answer)
                elif answer is not None:
                    with self.changed:
                        self.core.outbid(answer)
                    return False
                elif each not in partners:
                    self._newcomers.pop(each, None)  # it says hello again if it lives
                    return False
                else:
                    return False
        plan = proposal.plan()
        if not plan.may_go_on:
            return self._wait_for_the_log(plan)
        self._blocked_since = None
        if not self._install(proposal, plan):
            return False
        self._ask(plan.released, _release, timeout=10.0)
        return True

    def _install(self, proposal: Proposal, plan: Plan) -> bool:
        reports = proposal.reports
        if not any(reports[each].step != NEW for each in plan.members) and plan.released:
            # All members with a state have left: the job is over for the others, too.
            with self.changed:
                self.core.ended = True
            step = max(reports[each].step for each in plan.released)
            self._publish_end(step)
            self._ask(plan.members, _over, step, timeout=10.0)
            return True
        key = f"elastic/{proposal.ballot[0]}/{secrets.token_hex(6)}"
        done = self._ask(
            plan.members, _install, proposal.ballot, key, plan.members, plan.released,
            [reports[each] for each in (*plan.members, *plan.released)],
        )  # fmt: skip
        return all(each is True for each in done.values())

    def _wait_for_the_log(self, plan: Plan) -> bool:
        now = monotonic()
        if self._blocked_since is None:
            self._blocked_since = now
            logger.info("worker '%s' waits for the group's log, which decides about lost members", self.name)
        self._read_log()
        self._released.wait(_LOG_SECONDS)
        lost = [each for each in self.core.partners() if self._is_lost(each) and each not in self.core.dead]
        if now - self._blocked_since > _PATIENCE_SECONDS:
            names = (
                ", ".join(sorted({f"'{peer.name}'" for each in lost if (peer := self._peer(each))}))
                or "others"
            )
            error = PutOut(
                f"worker '{self.name}' cannot go on: {names} cannot be reached, and may go on without it. It "
                "must start again to take part in the elastic job"
            )
            self._ask(plan.members, _put_out, str(error), timeout=5.0)
        return False

    def _ask(
        self,
        members: Collection[int],
        function: Callable[..., Any],
        *args: Any,
        timeout: float = _CALL_SECONDS,
    ) -> dict[int, Any]:
        """Call a function at members, side by side; the values are None where that has failed."""
        calls: dict[int, Future[Any]] = {}
        answers: dict[int, Any] = dict.fromkeys(members)
        for each in members:
            peer = self._peer(each)
            if each != self.me and peer is not None:
                with contextlib.suppress(RpcError):
                    calls[each] = rpc_async(peer.member.info, function, args=(each, *args), timeout=timeout)
        if self.me in answers:
            try:
                answers[self.me] = function(self.me, *args)
            except (RpcError, OutdatedError) as error:
                logger.debug("%s failed here: %s", function.__name__, error)
        for each, call in calls.items():
            try:
                answers[each] = call.wait()
            except RpcError as error:
                logger.debug("%s failed at %x: %s", function.__name__, each, error)
            except Exception as error:
                logger.warning("%s failed at %x: %r", function.__name__, each, error)
        return answers

    # ---- what a proposer asks for

    def freeze(self, ballot: Ballot) -> Report | Ballot:
        """Return this member's report, or the later ballot."""
        with self.changed:
            self._take_in()
            if self.error is not None:
                raise GivenUpError(f"the job has failed on worker '{self.name}'")
            try:
                report = self.core.freeze(ballot)
            except OutdatedError:
                return self.core.ballot
            group = self.group
            self.changed.notify_all()
        if group is not None and not group.group.members.failed and not report.left:
            group.group.abort("the view changes")
        return report

    def install(
        self,
        ballot: Ballot,
        key: str,
        members: Sequence[int],
        released: Collection[int],
        reports: Sequence[Report],
    ) -> bool:
        """Form the group of a view, as all its members do at the same time, and decide about the attempt.

        That the group was formed shows that all members take part: it is the exchange of the reports, which
        the proposer has passed on.
        """
        peers = [self._peer(each) for each in members]
        if any(each is None or each.lost is not None for each in peers):
            raise GivenUpError("a member of the next view is lost")
        with self.changed:
            self._take_in()
            cut_off = [each for each in self.core.to_cut_off(members, released) if not self._is_lost(each)]
            try:
                self.core.install(ballot, members, released)
            except OutdatedError as error:
                raise GivenUpError(str(error)) from error
            self._watch_processes(members)
        self._cut_off(cut_off)
        rank = list(members).index(self.me)
        node = Node.of(self._agent, [each for each in peers if each is not None], key, owned=False)
        try:
            group = Group(node, range(len(members)), rank, key, _FORM_SECONDS)
        except RpcError as error:
            node.close_if_unused()
            raise GivenUpError(f"the group was not formed: {error}") from error
        except BaseException:
            node.close_if_unused()
            raise
        group.timeout = 0.0
        if not self._decide(ballot, members, reports, group):
            group.close()
            raise GivenUpError("a later ballot has begun")
        return True

    def _cut_off(self, workers: Sequence[int]) -> None:
        """Cut workers off that the next view leaves out, and wait until they must have noticed, unless they
        have died, which the proposer may have seen first.
        """
        for each in workers:
            peer = self._peer(each)
            if peer is not None:
                self._agent.group.lose(peer, "the elastic job goes on without it")
        processes = [self._processes.get(each) for each in workers]
        if any(each is None or not _has_ended(*each) for each in processes):
            self._released.wait(_NOTICE_SECONDS)

    def _decide(
        self, ballot: Ballot, members: Sequence[int], reports: Sequence[Report], group: Group
    ) -> bool:
        with self.changed:
            self._take_in()
            try:
                done = self.core.decide(ballot, members, reports)
            except OutdatedError:
                return False
            if self.closed:
                return False
            self._is_member = True
            before, self.group = self.group, FarcallProcessGroup(group)
            self._suspected = None
            if self.outcome is None:
                self.outcome = done.outcome
            for each in members:
                self._newcomers.pop(each, None)
            if done.outcome is Outcome.LOST:
                self.error = StateLostError(
                    f"all members of the elastic job that had its state are gone; worker '{self.name}' "
                    "had not loaded it yet. Start again, from a checkpoint"
                )
            self.changed.notify_all()
        if before is not None:
            before.shutdown()
        logger.info(
            "worker '%s': view %d of the elastic job has %d members, from step %d on",
            self.name, done.view.number, len(members), done.view.first,
        )  # fmt: skip
        return True

    def poked(self, ballot: Ballot) -> None:
        """Handle that a member waits for a view change."""
        with self.changed:
            if self.core.view is not None and self.core.view.ballot == ballot:
                self._suspected = ballot
        self._wake.set()

    def release(self) -> None:
        """Handle that the others go on without this member, which leaves."""
        self._released.set()

    def over(self, step: int) -> None:
        """Handle that the job is over, before this worker has had its state."""
        self.fail(self._finished(step))

    def failed_at(self, worker: str, text: str) -> None:
        """Handle that a member has failed."""
        self.fail(
            StepFailedError(f"the elastic job has ended, since worker '{worker}' has failed: {text}", worker)
        )

    def put_out(self, text: str) -> None:
        """Handle that the proposer of this part gives up."""
        self.fail(PutOut(text))

    # ---- the state

    def wait_until_given(self, view: View, step: int) -> bool:
        """Wait until the training thread has begun the step that newcomers observe; false if it is over."""

        def is_over() -> bool:
            return self.closed or self.error is not None or self.core.frozen or self.core.view is not view

        with self.changed:
            self.changed.wait_for(lambda: self.given_step == step or is_over(), _CALL_SECONDS)
            return self.given_step == step and not is_over()

    def give(self, ballot: Ballot, step: int) -> tuple[Ballot | None, Any]:
        """Return the view in which the last step was committed, and the state, to a newcomer."""
        view = self.core.view
        if (
            view is None
            or view.ballot != ballot
            or self.core.step == NEW
            or not self.wait_until_given(view, step)
        ):
            raise GivenUpError(f"worker '{self.name}' is not in this view any more")
        return self.core.last, self._state()

    def fetch(self, view: View) -> tuple[Ballot | None, Any] | None:
        """Get the state of a view's first step from a neighbour; None if the view is over."""
        olds = [each for each in view.members if each not in view.newcomers]
        first = view.members.index(self.me) % len(olds)
        for each in olds[first:] + olds[:first]:
            peer = self._peer(each)
            if peer is None or peer.lost is not None:
                continue
            try:
                answer: tuple[Ballot | None, Any] = rpc_async(
                    peer.member.info, _give, args=(each, view.ballot, view.first), timeout=0
                ).wait()
            except (WorkerLostError, MessageLostError, GivenUpError) as error:
                logger.debug("worker '%s' does not give its state: %s", peer.name, error)
            except Exception as error:
                if self._is_lost(each):  # the group may have forgotten it already
                    continue
                raise ElasticError(
                    f"worker '{self.name}' cannot get the state of the elastic job from worker "
                    f"'{peer.name}': {type(error).__name__}: {error}"
                ) from error
            else:
                return answer
        return None


def _present(log: Log) -> set[int]:
    return {
        each.arrival.member.incarnation for each in log.read() if each.arrival is not None and each.is_present
    }


def _difference(mine: str, other: str) -> str:
    here, there = mine.splitlines(), other.splitlines()
    for one, two in zip([*here, ""], [*there, ""], strict=False):
        if one != two:
            return f"{one!r} in place of {two!r}"
    return f"{len(here)} lines in place of {len(there)}"


def _stat(process: int) -> list[str] | None:
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _has_ended(process: int, start: int) -> bool:
    """Whether a process runs no code any more: the kernel sets the flag before it closes sockets."""
    try:
        fields = _stat(process)
    except OSError:
        return False  # this process could not look
    if fields is None or int(fields[_START]) != start:
        return True
    return fields[_STATE] in "ZX" or bool(int(fields[_FLAGS]) & _EXITING)


# ---- called remotely; ``to`` is the incarnation that is addressed


def _views(to: int | None) -> Views:
    agent: Any = current_agent()
    views = agent.extensions.get(EXTENSION)
    if not isinstance(views, Views) or to not in (None, views.me):
        raise GivenUpError(f"there is no member of this job in process {os.getpid()}")
    return views


def _hello(incarnation: int, key: tuple[int, int], description: str) -> tuple[Any, int, tuple[int, int]]:
    agent: Any = current_agent()
    if EXTENSION not in agent.extensions:
        return None, 0, (0, 0)
    return _views(None).greeted(incarnation, key, description)


def _freeze(to: int, ballot: Ballot) -> Report | Ballot:
    return _views(to).freeze(ballot)


def _install(
    to: int,
    ballot: Ballot,
    key: str,
    members: Sequence[int],
    released: Collection[int],
    reports: Sequence[Report],
) -> bool:
    return _views(to).install(ballot, key, members, released, reports)


def _poke(to: int, ballot: Ballot) -> None:
    _views(to).poked(ballot)


def _release(to: int) -> None:
    _views(to).release()


def _over(to: int, step: int) -> None:
    _views(to).over(step)


def _failed(to: int, worker: str, text: str) -> None:
    _views(to).failed_at(worker, text)


def _put_out(to: int, text: str) -> None:
    _views(to).put_out(text)


def _give(to: int, ballot: Ballot, step: int) -> tuple[Ballot | None, Any]:
    return _views(to).give(ballot, step)

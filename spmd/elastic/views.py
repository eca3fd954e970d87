"""Carries out what ``agreement`` decides: asks members, and forms the groups of views.

Locks: ``changed`` guards the member's part of the protocol; no call is made and no group is formed while it
is held.
Threads: losses are noted on the agent's loop and taken in by others (``losses``); members are asked on
executor threads; a thread of the job's own proposes views (``proposer``). The training thread prepares,
counts votes, and waits for outcomes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from time import monotonic
from typing import Any, Final

from rpc.agent.futures import Future
from rpc.api import get_worker_info, rpc_async
from rpc.errors import GivenUpError, RpcError
from rpc.runtime.current import current_agent
from rpc.runtime.legible import legible
from spmd.collectives import torch_internals
from spmd.elastic.agreement import (
    NEW,
    Ballot,
    Member,
    Outcome,
    OutdatedError,
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
from spmd.elastic.groups import Groups
from spmd.elastic.losses import FINISHED, Losses
from spmd.elastic.mates import Mates
from spmd.elastic.replicas import Replica
from spmd.elastic.requests import EXTENSION, ask

__all__ = ["PATIENCE_SECONDS", "STATE", "Views"]

logger = logging.getLogger(__name__)


_RETRY_SECONDS: Final = 0.05
STATE: Final = "state:"
"""The line of a description that precedes the state, which differs between the places in a replica."""

_CALL_SECONDS: Final = 120.0

PATIENCE_SECONDS: Final = 25.0
"""Time in which the group's log decides about lost members; a member that may not go on then gives up."""


class Views:
    """One member of the job of its agent's group, and its view. From any thread.

    Args:
        description: describes the job; the same text on all members.
        min_size: minimum number of replicas of the first view.
        state: returns the parts of this member's state, in the attempt that newcomers observe.
        replica: this member's replica.

    Attributes:
        core: this member's part of the protocol.
        changed: its lock; notified when an outcome or another view is there.
        groups: the process groups of the view.
        outcome: how the last attempt has ended; None while one is under way.
        given_step: the step that the training thread tries: newcomers may load its state.
        error: why the job has ended for this member, or None.
        closed: whether it has left.
        newcomers: workers that want to join, by incarnation, with their ``key``.
        replicas: the replicas of these.
        mates: the other workers of the replica.
        key: order of founders.
        losses: knows who is lost.
        suspected: a view that has failed, as a member says.
        woken: set when a view change may be due.
        released: set when the others go on without this member.
    """

    def __init__(
        self, description: str, min_size: int, state: Callable[[], Iterator[Any]], replica: Replica
    ) -> None:
        self._agent: Any = current_agent()
        self.me: int = self._agent.incarnation
        self.name = get_worker_info().name
        self.replica = replica
        self.core = Member(self.me, replica=replica.members)
        self.changed = threading.Condition(threading.RLock())
        self.groups: Groups | None = None
        self.outcome: Outcome | None = Outcome.ABORT
        self.given_step = NEW
        self.error: BaseException | None = None
        self.closed = False
        self.description, self.min_size, self._state = description, min_size, state
        self.newcomers: dict[int, tuple[int, int]] = {}
        self.replicas: dict[int, tuple[int, ...]] = {}
        self.key = (get_worker_info().id, self.me)
        self.losses = Losses(self._agent, self.core, self.changed, self._note, self._out)
        self.mates = Mates(self.core, self.losses, self.changed, self.ask, self._is_over)
        self._is_member = False
        self.released = threading.Event()
        self.woken = threading.Event()
        self.suspected: Ballot | None = None
        self._names: dict[int, str] = {}
        self._interrupted_at: float | None = None
        self._losses = 0
        self._last_loss: tuple[str, float] = ("", 0.0)
        if self._agent.is_static_group or "rpc.keeper" not in self._agent.extensions:
            raise ElasticError(
                "an elastic job needs a dynamic group, whose workers join and leave: start the workers with "
                "`farcall launch --dynamic`, or call init_rpc without a world_size"
            )
        if EXTENSION in self._agent.extensions:
            raise ElasticError(
                "there is an elastic job in this process already: leave it before another join"
            )
        torch_internals.prepare()

    # ---- the beginning, and the end

    def begin(self) -> None:
        """Answer other workers from now on."""
        self._agent.lifecycle.hooks.close.append(self.close)
        self._agent.extensions[EXTENSION] = self
        self.losses.begin()

    def found(self) -> None:
        """Found the job; with ``changed`` held."""
        self._is_member = True
        self.core.found()
        logger.info("worker '%s' founds the elastic job", self.name)
        self.woken.set()

    def check_store(self) -> None:
        """Raise ``Finished`` if the store says that the job has ended."""
        found = self.losses.on_store(lambda store: store.get(FINISHED))
        if found is not None:
            raise Finished.at(int(found), self.name)

    def check_ended(self) -> None:
        """Leave and raise ``Finished`` if this worker has come into the view of a job that has ended: it gets
        no state there.
        """
        with self.changed:
            has_come_too_late = self.error is None and self.core.ended and self.core.step == NEW
        if has_come_too_late:
            self.leave(_CALL_SECONDS)
            raise Finished.at(self._steps(), self.name)

    def _steps(self) -> int:
        """Return the number of steps that the job has committed, as far as this worker knows."""
        view = self.core.view
        return self.core.step if self.core.step != NEW or view is None else view.first

    def greeted(
        self, incarnation: int, key: tuple[int, int], description: str, replica: tuple[int, ...]
    ) -> tuple[Any, int, tuple[int, int], tuple[int, ...]]:
        """Answer a worker that wants to take part."""
        mine, own = self.description, self.core.replica
        if len(own) == len(replica) and own.index(self.core.me) != replica.index(incarnation):
            mine, description = (each.partition(STATE)[0] for each in (mine, description))
        if description != mine:
            raise JobMismatchError(
                f"worker '{self.name}' has another job: {_difference(mine, description)}. "
                "All members need the same model, optimizer, sampler and options"
            )
        with self.changed:
            if self.core.ended:
                return self._steps(), self.me, self.key, own
            if self.core.left or self.core.departing:
                raise GivenUpError(f"worker '{self.name}' is leaving the elastic job")
            if self.core.view is None or incarnation not in self.core.view.members:
                self.welcome(incarnation, key, replica)
            self.changed.notify_all()
            self.woken.set()
            return ("member" if self._is_member else "candidate"), self.me, self.key, own

    def welcome(self, incarnation: int, key: tuple[int, int], replica: tuple[int, ...]) -> None:
        """Remember a worker that wants to take part; with ``changed`` held."""
        self.newcomers[incarnation], self.replicas[incarnation] = (key[0], key[1]), tuple(replica)
        self.losses.watch_processes([incarnation])

    def leave(self, timeout: float) -> None:
        """Leave the job, outside of an attempt, and wait until the others go on without this member."""
        with self.changed:
            if self.closed:
                return
            self.core.departing = True
        self.suspect()
        deadline = monotonic() + timeout
        while not self.released.wait(_RETRY_SECONDS) and monotonic() < deadline:
            with self.changed:
                self.losses.take_in()
                if self.error is not None or all(map(self.losses.is_lost, self.core.partners())):
                    break
            self.woken.set()
        with self.changed:
            is_last = self.core.step != NEW and self.core.partners() <= self.core.dead
            self.core.ended = self.core.ended or (is_last and self.error is None)
        if self.core.ended:
            self.publish_end(self._steps())
        self.close()

    def publish_end(self, step: int) -> None:
        """Tell the store that the job has ended, for workers that come later."""
        with contextlib.suppress(RpcError):  # the store is gone, and with it the way for newcomers
            self.losses.on_store(lambda store: store.set(FINISHED, str(step).encode()))

    def close(self) -> None:
        """Leave at once. Idempotent."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
            groups, self.groups = self.groups, None
            self.changed.notify_all()
        self.woken.set()
        self.released.set()
        self.losses.close()
        with contextlib.suppress(ValueError):
            self._agent.lifecycle.hooks.close.remove(self.close)
        if self._agent.extensions.get(EXTENSION) is self:
            del self._agent.extensions[EXTENSION]
        if groups is not None:
            groups.close()

    def fail(self, error: ElasticError, *, tell: str | None = None) -> None:
        """End the job here, with an error; with ``tell`` on all members."""
        with self.changed:
            if self.error is not None or self.closed:
                return
            self.error = error
            groups = self.groups
            others = [each for each in self.core.partners() if not self.losses.is_lost(each)]
            self.changed.notify_all()
        self.released.set()
        if tell is not None:
            self.ask(others, Views.failed_at, self.name, tell, timeout=10.0)
        if groups is not None:
            groups.abort("the job has failed")
        self.replica.abort("the job has failed")  # the replica's others may wait for this worker, which lives

    def observed(self) -> dict[str, Any]:
        """Return the state for observers: the view, the step, and the losses."""
        view = self.core.view
        return {
            "view": 0 if view is None else view.number,
            "members": list(self._names.values()),
            "step": self._steps(),
            "observes": self.core.step == NEW,
            "losses": self._losses,
            "lost": self._last_loss[0],
            "took": round(self._last_loss[1], 3),
        }

    # ---- losses, and what follows

    def _out(self, reason: str) -> None:
        """Handle that this worker is out of its group, on the loop's thread."""
        error = PutOut(f"{reason}; the elastic job may go on without it")
        threading.Thread(target=self.fail, args=(error,), daemon=True).start()

    def _note(self, incarnation: int) -> None:
        """Handle a loss, on the loop's thread."""
        if incarnation in self.core.partners():
            self._interrupted_at = self._interrupted_at or monotonic()
        self.woken.set()

    def suspect(self) -> None:
        """Record that the group of the view has failed, or a member is gone; a view change follows."""
        with self.changed:
            if self.core.view is not None:
                self.suspected = self.core.view.ballot
        self.woken.set()

    def wants_to_grow(self) -> bool:
        """Whether this member's vote should ask for a view with newcomers; with ``changed`` held."""
        return self.core.proposer(self.losses.is_lost) == self.me and bool(self.living_newcomers())

    def awaited(self) -> list[str]:
        """Return the name of the worker that proposes the next view, if it is another one."""
        proposer = self.core.proposer(self.losses.is_lost)
        peer = None if proposer in (None, self.me) else self.losses.peer(proposer or 0)
        return [] if peer is None else [peer.name]

    def living_newcomers(self) -> list[int]:
        """Return the newcomers whose replicas want to join and are whole; with ``changed`` held."""
        there = {each for each in self.newcomers if not self.losses.is_lost(each)}
        return [
            each
            for each in self.newcomers
            if each in there and there.issuperset(set(self.replicas[each]) - {self.me})
        ]

    def _is_over(self) -> bool:
        return self.error is not None or self.closed or self.core.left

    def check_replica(self, cut_short: Exception | None = None) -> None:
        """Raise ``PutOut`` if this worker has no part in the job any more, since its replica is not whole.

        Args:
            cut_short: the exception that has ended a block after its commit for this reason, if any.
        """
        lost = self.mates.lost()
        if cut_short or self.core.missing or (lost and self.core.view is None):
            names = ", ".join(f"'{each}'" for each in lost) or "another worker"
            error = PutOut(
                f"worker '{self.name}' cannot go on, since its replica has lost {names}. "
                "All workers of the replica must start again to take part in the elastic job"
            )
            self.fail(error)
            raise error from cut_short

    def is_due(self) -> bool:
        """Whether a view change is needed, as far as this member knows; with ``changed`` held."""
        view = self.core.view
        return self.core.is_due(self.losses.is_lost) or (
            view is not None
            and (
                self.suspected == view.ballot or (view.size < self.min_size and bool(self.living_newcomers()))
            )
        )

    def ask(
        self,
        members: Collection[int],
        method: Callable[..., Any],
        *args: Any,
        timeout: float = _CALL_SECONDS,
    ) -> dict[int, Any]:
        """Call a method of members' views, side by side; the values are None where that has failed."""
        calls: dict[int, Future[Any]] = {}
        answers: dict[int, Any] = dict.fromkeys(members)
        for each in members:
            peer = self.losses.peer(each)
            if each != self.me and peer is not None:
                with contextlib.suppress(RpcError):
                    calls[each] = rpc_async(
                        peer.member.info, ask, args=(each, method, *args), timeout=timeout
                    )
        if self.me in answers:
            try:
                answers[self.me] = ask(self.me, method, *args)
            except (RpcError, OutdatedError) as error:
                logger.debug("%s failed here: %s", method.__name__, error)
        for each, call in calls.items():
            try:
                answers[each] = call.wait()
            except RpcError as error:
                logger.debug("%s failed at %x: %s", method.__name__, each, legible(error))
            except Exception as error:
                said = f"{type(error).__name__}: {legible(error)}"
                logger.warning("%s failed at %x: %s", method.__name__, each, said)
        return answers

    # ---- what a proposer asks for

    def freeze(self, ballot: Ballot) -> Report | Ballot:
        """Return this member's report, or the later ballot."""
        with self.changed:
            self.losses.take_in()
            if self.error is not None and not self.core.left:
                raise GivenUpError(f"the job has failed on worker '{self.name}'")
            try:
                report = self.core.freeze(ballot)
            except OutdatedError:
                return self.core.ballot
            groups = self.groups
            self.changed.notify_all()
        if groups is not None and not report.left:
            groups.abort("the view changes")
        return report

    def resign(self, ballot: Ballot, reports: Sequence[Report]) -> Report:
        """Promise to leave, since the replica is not whole; returns the report that says so."""
        with self.changed:
            try:
                outcome = self.core.resign(ballot, reports)
            except OutdatedError as error:
                raise GivenUpError(str(error)) from error
            if self.outcome is None:
                self.outcome = outcome
            self.changed.notify_all()
            return self.core.report()

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
        peers = [self.losses.peer(each) for each in members]
        rank, size = list(members).index(self.me), len(self.core.replica)
        try:
            if any(each is None or each.lost is not None for each in peers):
                raise GivenUpError("a member of the next view is lost")
            cut_off = self._agree(ballot, members, released, reports)
        except BaseException:
            Groups.decline(self._agent, peers, rank, size, key)
            raise
        self.losses.cut_off(cut_off, "the elastic job goes on without it", self.released)
        there = [each for each in peers if each is not None]
        groups = Groups.form(self._agent, there, rank, size, key)
        if not self._decide(ballot, members, reports, groups):
            groups.discard()
            raise GivenUpError("a later ballot has begun")
        return True

    def _agree(
        self, ballot: Ballot, members: Sequence[int], released: Collection[int], reports: Sequence[Report]
    ) -> set[int]:
        """Take part in a view from now on; returns the workers that are to be cut off first."""
        with self.changed:
            self.losses.take_in()
            cut_off = self.core.to_cut_off(members, released, reports)
            try:
                self.core.install(ballot, members, released)
            except OutdatedError as error:
                raise GivenUpError(str(error)) from error
            self.losses.watch_processes(members)
            return {each for each in cut_off if not self.losses.is_lost(each)}

    def _decide(
        self, ballot: Ballot, members: Sequence[int], reports: Sequence[Report], groups: Groups
    ) -> bool:
        with self.changed:
            self.losses.take_in()
            try:
                done = self.core.decide(ballot, members, reports)
            except OutdatedError:
                return False
            if self.closed:
                return False
            self._is_member = True
            before, self.groups = self.groups, groups
            self.replica.add(groups.replica)
            self.suspected = None
            stay = {*members, *(each.member for each in reports if each.left)}
            lost = sorted(name for each, name in self._names.items() if each not in stay)
            self._names = {each: peer.name if (peer := self.losses.peer(each)) else "" for each in members}
            took = monotonic() - (self._interrupted_at or monotonic())
            self._interrupted_at = None
            if lost:
                self._losses, self._last_loss = self._losses + len(lost), (", ".join(lost), took)
            if self.outcome is None:
                self.outcome = done.outcome
            for each in members:
                self.newcomers.pop(each, None)
            if done.outcome is Outcome.LOST:
                self.error = self._state_is_lost()
            self.changed.notify_all()
        if before is not None:
            before.close()
        without = f", without {', '.join(lost)}, {took:.2f} s after the loss" if lost else ""
        logger.info(
            "worker '%s': view %d of the elastic job has %d members%s, from step %d on",
            self.name, done.view.number, len(members), without, done.view.first,
        )  # fmt: skip
        return True

    def _state_is_lost(self) -> StateLostError:
        return StateLostError(
            f"all members of the elastic job that had its state are gone; worker '{self.name}' had not "
            "loaded it yet. Start again, from a checkpoint"
            if len(self.core.replica) == 1
            else "each replica of the elastic job that had its state has lost a worker, so worker "
            f"'{self.name}' cannot go on. Start again, from a checkpoint"
        )

    def state_lost(self) -> None:
        """Handle that no replica with the state is whole."""
        self.fail(self._state_is_lost())

    def poked(self, ballot: Ballot) -> None:
        """Handle that a member waits for a view change."""
        with self.changed:
            if self.core.view is not None and self.core.view.ballot == ballot:
                self.suspected = ballot
        self.woken.set()

    def release(self) -> None:
        """Handle that the others go on without this member, which leaves."""
        self.released.set()

    def over(self, step: int) -> None:
        """Handle that the job is over, before this worker has had its state."""
        self.fail(Finished.at(step, self.name))

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

    def give(self, ballot: Ballot, step: int) -> Iterator[Any]:
        """Yield the view in which the last step was committed, and the parts of the state, to a newcomer."""
        view = self.core.view
        is_there = view is not None and view.ballot == ballot and self.core.step != NEW
        if view is not None and is_there and self.wait_until_given(view, step):  # it is kept only then
            for each in itertools.chain([self.core.last], self._state()):
                if not self.wait_until_given(view, step):
                    break
                yield each
            else:
                return
        raise GivenUpError(f"worker '{self.name}' is not in this view any more")


def _difference(mine: str, other: str) -> str:
    here, there = mine.splitlines(), other.splitlines()
    for one, two in zip([*here, ""], [*there, ""], strict=False):
        if one != two:
            return f"{one!r} in place of {two!r}"
    return f"{len(here)} lines in place of {len(there)}"

"""The copies of replicated objects in this process: carries out what ``order`` decides.

Locks: a host's ``lock`` is held while its copy runs a call, and by a primary until its backups have answered.
Only the backups of a view are waited for, which wait for nobody. ``changed`` guards what is known of losses.
Threads: calls and messages run on executor threads. A host's own thread takes over and adds copies.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import replace
from time import monotonic
from typing import Any, Final

from dist_autograd.api import has_context
from dist_autograd.contexts import current
from rpc.errors import (
    GivenUpError,
    MessageLostError,
    NotInitializedError,
    RpcError,
    SerializationError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.runtime.blocking import Event, wait_for_event
from rpc.runtime.interrupts import is_interruption
from rpc.runtime.legible import legible
from rpc.serialization.exception_state import twin
from rpc.serialization.settings import allow_function
from spmd.elastic.errors import ElasticError, PutOut
from spmd.elastic.losses import LOG_SECONDS
from spmd.elastic.replicated.hosts import CANDIDATE, FOUNDING, MEMBER, STANDBY, Hosts, Status, part
from spmd.elastic.replicated.machine import WHOLE, Method, ObjectMachine, owned
from spmd.elastic.replicated.order import (
    Answer,
    Apply,
    Call,
    Copy,
    DeposedError,
    Done,
    Failed,
    Install,
    Message,
    OutdatedCallError,
    Refusal,
    Steps,
    Unsendable,
    View,
)

__all__ = ["ELSEWHERE", "RAISED", "UNANSWERED", "VALUE", "Host", "acknowledge", "call"]

logger = logging.getLogger(__name__)

ELSEWHERE, RAISED, VALUE = "elsewhere", "raised", "value"
"""What the answer to a call has: nothing, as this worker has no primary; an exception; a value."""

UNANSWERED: Final = (
    WorkerLostError,
    UnknownWorkerError,
    MessageLostError,
    GivenUpError,
    NotInitializedError,
    PutOut,
)
"""Errors after which a message is repeated, to the same worker or another one."""

_OF_GRADIENTS: Final = ("norms", "scale")
"""Methods of optimizers about gradients, which only the primary has."""

_FIRST_PAUSE: Final = 0.005
_ASK_SECONDS: Final = 0.1
_COPY_SECONDS: Final = 10.0
"""Interval at which it is tried to copy an object that cannot be copied."""
_REST_SECONDS: Final = 10.0, 600.0
"""Time in which a worker that could not take a copy over is not asked again: the first one, which doubles,
and the longest.
"""


class Host:
    """This worker's part in one replicated object: its copy, or that it can keep one. From any thread.

    Args:
        hosts: of this agent.
        name: of the object.
        description: what it is, and how many copies it has; the same on all hosts.
        maker: makes the object.
        copies: the wanted number of copies.

    Attributes:
        copy: this worker's copy.
        identity: see ``Status``.
        offers: workers that can keep a copy.
        error: why this worker could not keep one, when it was last asked; or None.
        woken: set when there may be something to do.
    """

    def __init__(
        self, hosts: Hosts, name: str, description: str, maker: Callable[[], Any], copies: int
    ) -> None:
        self.hosts, self.name, self.description = hosts, name, description
        self._own_name: str = hosts.agent.info.name
        self.machine = ObjectMachine(maker)
        self.copy = Copy(hosts.me, self.machine, copies)
        self.copy.gone = hosts.gone
        self.identity = 0
        self.lock = threading.Lock()
        self.offers: set[int] = set()
        self.error: Exception | None = None
        self.woken = threading.Event()
        self._acknowledged: dict[int, int] = {}
        self._entering: set[int] = set()
        self._founding = False
        self._warned = False
        self._serial = 0
        self._rest, self._rests_until = _REST_SECONDS[0], 0.0
        hosts.by_name[name] = self
        threading.Thread(target=self._run, name=f"copy of {name}", daemon=True).start()

    # ---- the beginning

    def enter(self, deadline: float) -> int:
        """Find the object, or found it with the other workers that can keep a copy; return its identity when
        it takes calls.

        Raises:
            ElasticError: there were not enough workers in time, or this one cannot keep its copy.
            Exception: what making the object has raised.
        """
        thread = threading.get_ident()
        self._entering.add(thread)
        try:
            return self._enter(deadline)
        except BaseException:
            # Not if the host's own thread has the lock for long: it has found others.
            if self._entering == {thread} and self.lock.acquire(timeout=_ASK_SECONDS):
                try:
                    view = self.copy.view
                    if view is None or (view.members == (self.hosts.me,) and not self.copy.is_ready):
                        self.copy.deposed = True  # it adds no copy any more
                        self.give_up()
                finally:
                    self.lock.release()
            raise
        finally:
            self._entering.discard(thread)

    def _enter(self, deadline: float) -> int:
        hosts, copy = self.hosts, self.copy
        while True:
            hosts.check()
            found = hosts.survey(self.name, self.description, offer=True)
            ready = [each for each in found.values() if each.ready]
            if ready:
                return ready[0].identity
            if self.error is not None:
                raise ElasticError(
                    f"worker '{self._own_name}' cannot keep a copy of '{self.name}': "
                    f"{type(self.error).__name__}: {self.error}"
                ) from self.error
            if copy.view is None and not any(each.role == MEMBER for each in found.values()):
                self._try_to_found(found)
            wait_for_event(Event(), min(deadline, monotonic() + _ASK_SECONDS))
            if monotonic() > deadline:
                there = sum(each.role != "" for each in found.values())
                raise ElasticError(
                    f"'{self.name}' has {copy.copies} copies, each on a worker of its own that calls "
                    f"elastic.Replicated: only {there} of the {len(found)} workers of the group have, in time"
                )

    def _try_to_found(self, found: Mapping[int, Status]) -> None:
        """Found the object if no other worker does. One that is about to says so before it asks all others,
        and founds if none of them has said so: of two, at most one finds that.
        """
        hosts = self.hosts
        own = hosts.agent.info.id
        peers = [hosts.losses.peer(each) for each, status in found.items() if status.role == CANDIDATE]
        is_first = not any(each is not None and each.member.info.id < own for each in peers)
        if not is_first or not hosts.is_complete(found):
            return
        with self.lock:
            if self.copy.view is not None:
                return  # another thread has founded it
            self._founding = True
            try:
                found = hosts.survey(self.name, self.description, offer=True)
                others = [status for each, status in found.items() if each != hosts.me]
                if any(each.role in (FOUNDING, MEMBER) for each in others) or not hosts.is_complete(found):
                    return
                self.machine.make()
                if self.copy.copies > 1:
                    self.machine.snapshot()
                self.identity = secrets.randbits(62)
                self.copy.found()
                self._drive(self.copy.settle())
            finally:
                self._founding = False
        self.woken.set()

    def give_up(self) -> None:
        """Have no part in the object any more; ends this host's thread."""
        if self.hosts.by_name.get(self.name) is self:
            del self.hosts.by_name[self.name]
        self.woken.set()

    def status(self) -> Status:
        """Return what to tell other workers."""
        view = self.copy.view
        if view is None:
            role = FOUNDING if self._founding else CANDIDATE if self._entering else STANDBY
            return Status("" if monotonic() < self._rests_until and not self._founding else role)
        if self.copy.deposed:
            return Status()
        if not self.copy.is_primary:
            return Status(MEMBER, self.identity)
        return Status(MEMBER, self.identity, view.number, self.copy.is_ready)

    # ---- a backup

    def receive(self, identity: int, sender: int, serial: int, message: Message) -> Answer:
        """Do what the primary asks for."""
        with self.lock:
            self.hosts.check()
            if self.copy.view is not None and identity != self.identity:
                return Refusal.UNFIT, 0
            self.hosts.learn(())
            if isinstance(message, Install):
                self._watch(message.view)  # before the state is loaded: the others may die meanwhile
            try:
                answer: Answer = self.copy.receive(sender, serial, message)
            except Exception as error:  # the state cannot be taken over
                self.error = error
                logger.warning(
                    "worker '%s' cannot keep a copy of '%s'", self._own_name, self.name,
                    exc_info=error,
                )  # fmt: skip
                answer = Refusal.UNFIT, 0
            if isinstance(answer, tuple) and answer[0] is Refusal.UNFIT:
                self._rests_until = monotonic() + self._rest
                self._rest = min(2 * self._rest, _REST_SECONDS[1])
            if isinstance(message, Install) and isinstance(answer, Done):
                self.identity, self.error = identity, None
                self.woken.set()  # all copies before this one may be gone already
            return answer

    def _watch(self, view: View | None) -> None:
        if view is not None:
            with self.hosts.changed:
                self.hosts.losses.watch_processes(view.members)

    # ---- the primary

    def call(self, call: Call, begun: int) -> tuple[str, Any]:
        """Run a call on all copies, for its caller.

        Args:
            call: the call.
            begun: the primary with which the caller's autograd context has begun; 0 if there is none.
        """
        copy, machine = self.copy, self.machine
        context = current.get()
        is_lost = context is not None and begun not in (0, self.hosts.me)
        with self.lock:
            view = copy.view
            if not copy.is_primary or view is None or not copy.is_ready or self.hosts.closed.is_set():
                return ELSEWHERE, None
            ended = tuple(each for each in copy.sessions if each in self.hosts.lost)
            what: Method = call.what
            if call.session == self.hosts.me:  # the caller may go on with its own arguments
                args, kwargs = owned((what.args, dict(what.kwargs)), tracked=True)
                what = what._replace(args=args, kwargs=kwargs)
            for each, number in tuple(self._acknowledged.items()):
                if copy.has_acknowledged(each, number):
                    del self._acknowledged[each]
            acknowledged = tuple(self._acknowledged.items())
            call = Call(call.session, call.number, call.answered, what, ended, acknowledged)
            try:
                if (what.target, what.name) == (WHOLE, "workers"):
                    self._drive(copy.settle())
                    return VALUE, self._names()
                if what.target >= 0 and what.name in _OF_GRADIENTS:
                    self._drive(copy.settle())
                    outcome = machine.run(self._prepared(what, is_lost))
                else:
                    outcome = self._drive(copy.replicate(call, lambda what: self._prepared(what, is_lost)))
            except DeposedError:
                return ELSEWHERE, None
            except WorkerLostError as error:
                return RAISED, error
            except OutdatedCallError:
                return RAISED, ElasticError(
                    f"call {call.number} of '{self.name}' is not run: its caller has given it up, or was lost"
                )
            finally:
                if len(self._members()) < len(view.members):
                    self.woken.set()
            live, machine.live = machine.live, None
        if outcome.error is not None:
            if isinstance(outcome.error, RpcError):  # not to be taken for one of this call
                return RAISED, outcome.error
            raise twin(outcome.error)  # a copy: this frame refers to the outcome, a cycle
        if outcome.tracked and context is not None:
            if is_lost or live is None:
                return RAISED, _lost(self.name, f"{what.name} has been run, but the graph of its value")
            return VALUE, live
        return VALUE, outcome.value

    def acknowledge(self, session: int, answered: int) -> None:
        """Note which answers a caller has, for the next call that is run; see ``Call.acknowledged``."""
        self._acknowledged[session] = max(answered, self._acknowledged.get(session, 0))

    def _prepared(self, what: Method, is_lost: bool) -> Method:
        """Return what all copies run. Of a context, only the primary has the gradients."""
        if what.target >= 0 and what.name in ("step", *_OF_GRADIENTS):
            context_id = what.args[0]
            if is_lost or not has_context(context_id):
                raise _lost(self.name, f"{what.name} has not been run, since autograd context {context_id}")
            if what.name == "step":
                return Method(
                    what.target, "step_with", (self.machine.gradients(what.target, context_id),), {}
                )
        elif is_lost and what.tracked:
            raise _lost(self.name, f"{what.name} has not been run, since its autograd context")
        return what

    def _drive(self, steps: Steps) -> Any:
        """Carry out the steps of a primary, with ``lock`` held."""
        answers: Mapping[int, Answer] | None = None
        pause = _FIRST_PAUSE
        with contextlib.closing(steps):
            while True:
                try:
                    messages = steps.send(answers)  # type: ignore[arg-type]  # None at first
                except StopIteration as end:
                    return end.value
                self._watch(self.copy.view)
                answers = self._exchange(messages)
                if all(each is None or isinstance(each, Failed) for each in answers.values()):
                    self.hosts.closed.wait(pause)
                    pause = min(2 * pause, LOG_SECONDS)
                self.hosts.check()
                self.hosts.learn(messages)

    def _exchange(self, messages: Mapping[int, Message]) -> dict[int, Answer]:
        hosts = self.hosts
        self._serial += 1
        answers: dict[int, Answer] = dict.fromkeys(messages)
        calls = {}
        for to, message in messages.items():
            peer = hosts.losses.peer(to)
            if peer is None or peer.lost is not None:
                continue
            args = (self.name, self.identity, hosts.me, self._serial, to, _detached(message))
            try:  # outside of the caller's autograd context
                calls[to] = Context().run(hosts.agent.call_async, peer.member.info, deliver, args, {}, 0.0)
            except SerializationError as error:
                answers[to] = Unsendable(error)
            except RpcError as error:
                logger.debug("copy %x of '%s' cannot be sent to: %s", to, self.name, error)
        for to, each in calls.items():
            try:
                answers[to] = each.wait()
            except UNANSWERED as error:
                logger.debug("copy %x of '%s' has not answered: %s", to, self.name, error)
            except Exception as error:
                if is_interruption(error):
                    raise
                if not (isinstance(error, RpcError) and hosts.is_lost(to)):
                    answers[to] = Failed(error)
                    logger.warning("copy %x of '%s' has failed: %s", to, self.name, legible(error))
        return answers

    # ---- the host's own thread

    def _run(self) -> None:
        hosts = self.hosts
        while hosts.by_name.get(self.name) is self and not hosts.closed.is_set():
            pause = None
            try:
                hosts.check()
                pause = self._look()
            except DeposedError:
                logger.info("another copy of '%s' has taken over from worker '%s'", self.name, self._own_name)
            except PutOut as error:
                logger.warning("%s", error)
                return
            except RpcError as error:
                pause = _ASK_SECONDS
                logger.debug("the copies of '%s' could not be looked after: %s", self.name, error)
            self.woken.wait(pause)
            self.woken.clear()

    def _look(self) -> float | None:
        """Take over, go on without lost copies, or add one. Return the seconds after which this has to be
        tried again, or None.
        """
        hosts, copy = self.hosts, self.copy
        view = copy.view
        if view is None or copy.deposed:
            return None
        if not copy.is_primary:
            before = view.members[: view.members.index(hosts.me)]
            if not all(map(hosts.is_lost, before)):
                return None
            hosts.learn(before)
            with self.lock:
                if not copy.may_take_over():
                    return _ASK_SECONDS
                copy.take_over()
                self._drive(copy.settle())
            logger.warning(
                "worker '%s' has taken over '%s' from a worker that is lost",
                self._own_name,
                self.name,
            )
        elif lost := [each for each in view.members if hosts.is_lost(each)]:
            hosts.learn(lost)
            self._settle()
            if any(map(hosts.is_lost, self._members())):
                return _ASK_SECONDS  # one may live, as far as is known
        if len(self._members()) >= copy.copies:
            return None
        found = hosts.survey(self.name, self.description)
        self.offers |= {each for each, status in found.items() if status.role in (STANDBY, CANDIDATE)}
        candidates = [each for each in self.offers if not hosts.is_lost(each) and copy.may_add(each)]
        self.offers.clear()
        copy.candidate = max(candidates, key=self._is_elsewhere, default=None)
        if copy.candidate is None:
            return LOG_SECONDS
        self._settle()
        if copy.failure is not None and not self._warned:
            logger.warning("'%s' has a copy less, as it cannot be copied: %s", self.name, copy.failure)
        self._warned = copy.failure is not None
        return _COPY_SECONDS if self._warned else _ASK_SECONDS

    def _settle(self) -> None:
        """Settle, unless a call has the lock for long: the next one settles before it runs."""
        if self.lock.acquire(timeout=_ASK_SECONDS):
            try:
                self._drive(self.copy.settle())
            finally:
                self.lock.release()

    def _members(self) -> tuple[int, ...]:
        view = self.copy.view
        return () if view is None else view.members

    def _names(self) -> list[str]:
        peers = [self.hosts.losses.peer(each) for each in self._members()]
        return [each.name for each in peers if each is not None]

    def _is_elsewhere(self, candidate: int) -> bool:
        """Whether a worker is on another host than all copies."""
        peers = self.hosts.losses.peer
        taken = [peer.member.host for each in self._members() if (peer := peers(each)) is not None]
        peer = peers(candidate)
        return peer is not None and peer.member.host not in taken


def _detached(message: Message) -> Message:
    if not isinstance(message, Apply) or message.call is None:
        return message
    return replace(message, call=replace(message.call, what=message.call.what.detached()))


def _lost(name: str, what: str) -> WorkerLostError:
    """Return the error of a call whose gradients are lost: an answer, so that the call is not repeated."""
    reason = f"the worker that had '{name}' is lost"
    return WorkerLostError(
        f"{what} was lost with the worker that had '{name}': leave the autograd context, and compute again "
        "in a new one",
        name,
        reason,
    )


# ---- called remotely


@allow_function
def deliver(name: str, identity: int, sender: int, serial: int, to: int, message: Message) -> Answer:
    """See ``Host.receive``; ``to`` is the incarnation that is addressed."""
    host = part(name)
    if not isinstance(host, Host) or host.hosts.me != to:
        return Refusal.UNFIT, 0
    return host.receive(identity, sender, serial, message)


@allow_function
def call(name: str, identity: int, sent: Call, begun: int) -> tuple[str, Any]:
    """See ``Host.call``."""
    host = part(name)
    if not isinstance(host, Host) or host.identity != identity:
        return ELSEWHERE, None
    return host.call(sent, begun)


@allow_function
def acknowledge(name: str, identity: int, session: int, answered: int) -> None:
    """See ``Host.acknowledge``."""
    host = part(name)
    if isinstance(host, Host) and host.identity == identity:
        host.acknowledge(session, answered)

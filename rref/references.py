"""The shell round the reference protocol: one per agent. It holds the objects owned here, and turns the
protocol's actions into messages. On which thread a step of the protocol is taken is the business of
``steps``; who serves those that fetch or use an object, of ``serving``.

Objects are dropped on an executor thread, since their destructors are user code.
"""

from __future__ import annotations

import contextlib
import threading
import time
from _thread import LockType
from collections.abc import Callable
from typing import Any, Final, TypeVar

from rpc.agent.device_ports import Ready
from rpc.agent.hooks import Hooks
from rpc.agent.ports import CallsUnderWay, ControlMessages
from rpc.errors import NotInitializedError, ProtocolError, RpcTimeoutError, RRefError
from rpc.group.peer import Peer
from rpc.group.workers import Member
from rpc.runtime.blocking import INFINITE, check_may_block, wait_for
from rpc.runtime.executor import Executor
from rpc.runtime.interrupts import protected
from rpc.runtime.mailbox import Mailbox
from rpc.serialization.payload import Payload
from rref.creation import Creation
from rref.ports import ReferenceCalls, Workers
from rref.protocol.machine import Protocol
from rref.protocol.messages import Action, Fence, ForkId, Free, Ref, RRefId, Send, parse_descriptor
from rref.requests import CREATE, name_creation, turns_of_object
from rref.steps import LEFT, Steps
from rref.turns import Turns
from rref.value import Value

__all__ = ["References"]

TOPIC: Final = "rref"

_MAX_OBSERVED: Final = 200
"""Maximum number of objects that observers are told; the newest."""

_SWEEP_SECONDS: Final = 60.0

R = TypeVar("R")


class References:
    """All that one worker knows of remote references. From any thread, except where noted.

    Args:
        incarnation: of this worker, which has not joined a group yet.
        calls, under_way, workers, control: see ``rref.ports``.
        lose: cuts off a worker; from any thread.
        ready: returns the work on devices that makes an object; see ``RequestRunner.ready``.

    Attributes:
        calls, workers: as given.
    """

    def __init__(
        self,
        incarnation: int,
        calls: ReferenceCalls,
        under_way: CallsUnderWay,
        workers: Workers,
        control: ControlMessages,
        lose: Callable[[Peer, str], object],
        hooks: Hooks,
        mailbox: Mailbox,
        executor: Executor,
        ready: Callable[[Any], Ready | None],
    ) -> None:
        self.calls = calls
        self.workers = workers
        self._under_way = under_way
        self._control = control
        self._lose = lose
        self._mailbox = mailbox
        self._executor = executor
        self._ready = ready
        self._left = False
        self.released = False
        """Whether all references have been given back, or the agent closes."""
        self.backward: Callable[[Any, int, bool], None] | None = None
        """Runs ``RRef.backward``; distributed autograd sets it, if it is installed."""
        self.futures = threading.RLock()
        """Held while the future of a creation is made."""
        self._protocol = Protocol(incarnation)
        self.steps = Steps(self._protocol, mailbox, self._act, self._malformed)
        self.state, self.when_settled = self.steps.state, self.steps.when_settled
        self.reason = self._protocol.reason
        self._values: dict[RRefId, Value] = {}
        self.find: Callable[[RRefId], Value | None] = self._values.get
        """The object of a reference whose owner is this worker; None if it is not here (any more, or yet)."""
        self._waiting: set[LockType] = set()
        """Threads that wait for a reference to be settled, each on its lock."""
        self._sweeps_later = False
        control.on_batch(TOPIC, self._messages_arrived)
        hooks.joined.append(self._peer_joined)
        hooks.gone.append(self._peer_gone)
        hooks.close.append(self._closing)
        hooks.closed.append(self._closed)
        hooks.forked.append(self._closing)
        hooks.release.append(self.release_all)
        hooks.check.append(self.check_leaks)

    # ---- what the protocol asks for, and what it hears

    def _act(self, actions: list[Action]) -> None:
        freed: list[Value] = []
        for action in actions:
            match action:
                case Send(incarnation, message):
                    peer = self.workers.by_incarnation(incarnation)
                    if peer is not None:
                        self._control.post(peer, TOPIC, message)
                    elif message[0] == "wanted" and self.workers.view.static:
                        self._mailbox.soon(self._nobody, incarnation)
                case Free(rref):
                    value = self._values.pop(rref, None)
                    if value is not None:
                        freed.append(value)
                        del value
                case Fence(incarnation, reason):
                    self._mailbox.soon(self._fence, (incarnation, reason))
        if freed:
            self._executor.submit((list.clear, freed))
            self._watch_late()  # a tombstone may be in its place

    def _watch_late(self) -> None:
        """See to it that what waits for a late message is swept."""
        if not self._sweeps_later and self._protocol.waits_for_sweep:
            self._mailbox.soon(self._set_sweep_timer, None)

    def _fence(self, which: tuple[int, str]) -> None:
        incarnation, reason = which
        peer = self.workers.by_incarnation(incarnation)
        if peer is not None:
            self._lose(peer, f"another worker found it gone: {reason}")
        else:  # in a dynamic group, it died before it came to introduce itself here: keep it out
            self.workers.view.leave(incarnation, reason)
            self.steps.do(self._protocol.peer_lost, incarnation, reason)

    def _nobody(self, incarnation: int) -> None:
        self.steps.do(self._protocol.nobody, incarnation)

    def _set_sweep_timer(self, _: None) -> None:
        if not self._sweeps_later:
            self._sweeps_later = True
            self._mailbox.later(_SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        self._sweeps_later = False
        self.steps.do(self._protocol.sweep)
        self._watch_late()

    def _peer_joined(self, peer: Peer) -> None:
        self.steps.do(self._protocol.peer_joined, peer.incarnation)

    def _peer_gone(self, peer: Peer, reason: str) -> None:
        self.steps.do(self._protocol.peer_lost, peer.incarnation, f"worker '{peer.name}' is gone: {reason}")

    def _messages_arrived(self, peer: Peer, messages: list[Any]) -> None:
        self.steps.do(self._receive, messages, peer.incarnation)
        self._watch_late()

    def _receive(self, messages: list[Any], peer: int) -> None:
        for message in messages:
            self._protocol.receive(peer, message)

    def _malformed(self, args: tuple[Any, ...], error: ProtocolError) -> None:
        """A step that was left was of a peer, which stands last among its arguments."""
        peer = self.workers.by_incarnation(args[-1])
        if peer is not None:
            reason = f"it sent a malformed message: {error}"
            self._mailbox.call(self._lose, peer, reason)

    # ---- beginnings and ends

    def own(self, content: Any) -> tuple[RRefId, Ref]:
        """An object of this worker that is to be referred to."""
        rref = self._protocol.new_id()
        self._values[rref] = Value.of(content, self._ready(content))
        self.steps.do(self._protocol.own, rref)
        return rref, rref

    @protected
    def create(
        self,
        peer: Peer,
        target: dict[str, Any],
        payload: Payload,
        timeout: float,
        what: object,
        bind: Callable[[References, Peer, RRefId, Ref, Creation], R],
    ) -> R:
        """Have an object made on a worker, this one included.

        Args:
            target: added to the payload's header: what to call, if it is a method; see ``RRef``.
            timeout: seconds, 0 for none.
            bind: makes what the user gets, which releases the reference in the end.
        """
        rref, fork = self._protocol.new_id(), self._protocol.new_id()
        payload.header.update(target)
        if peer.is_self:
            self._values[rref] = Value(turns_of_object(payload.header))
        self.steps.do(self._protocol.create, peer.incarnation, rref, fork)
        name_creation(payload, rref, fork)
        creation = self._under_way.open(peer, what, timeout, Creation, payload.header, "remote")
        creation.begin(self, rref, fork)
        try:
            self.calls.transmit(creation, CREATE, payload)
        except BaseException as error:  # such as Ctrl-C, while too much is queued
            self.calls.drop(creation)
            self.creation_failed(peer.incarnation, rref, fork, f"it could not be sent: {error}")
            self.release(fork)
            raise
        self._under_way.watch(creation)
        return bind(self, peer, rref, fork, creation)

    def created(self, owner: int, rref: RRefId, fork: ForkId) -> None:
        """The owner has answered a creation."""
        take = self.steps.do if self.steps.is_awaited(fork) else self.steps.later
        take(self._protocol.created, owner, rref, fork)

    def creation_failed(self, owner: int, rref: RRefId, fork: ForkId, reason: str) -> None:
        """A creation timed out, or could not be sent."""
        self.steps.do(self._protocol.creation_failed, owner, rref, fork, reason)
        self._watch_late()

    def fork(self, rref: RRefId, ref: Ref, owner: Peer, to: Peer) -> list[Any]:
        """A descriptor for a message to ``to``."""
        fork = self._protocol.new_id()
        self.steps.do(self._protocol.fork, ref, to.incarnation, fork)
        return [owner.incarnation, rref, fork]

    def take_back(self, descriptor: Any) -> None:
        """The message with this descriptor was not sent."""
        owner, rref, fork = descriptor
        self.steps.do(self._protocol.take_back, (owner, tuple(rref), tuple(fork)))

    def adopt(self, descriptor: Any, source: Peer) -> Ref:
        """Take in a descriptor that came with a message."""
        ref = parse_descriptor(descriptor)[2]
        self.steps.do(self._protocol.adopt, descriptor, source.incarnation)
        self._watch_late()
        return ref

    def gone_owner(self, member: Member, reason: str) -> Peer:
        """Whom a reference names that is gone and not known here: references to its objects have failed."""
        self.steps.do(
            self._protocol.peer_lost, member.incarnation, f"worker '{member.name}' is gone: {reason}"
        )
        return self.workers.gone(member, reason)

    def release(self, ref: Ref) -> None:
        """The last Python object of a reference is gone. Safe in finalizers."""
        self.steps.later(self._protocol.release, ref)

    def _closing(self) -> None:
        self.released = True

    def release_all(self) -> None:
        """For a graceful shutdown: give back everything that this worker refers to elsewhere."""
        self.released = True
        self.steps.catch_up()
        self.steps.do(self._protocol.release_all)

    def wait_settled(self, ref: Ref, timeout: float, owner: str) -> None:
        """Wait until a reference is confirmed or failed.

        Args:
            owner: the name of the worker that is to confirm it.

        Raises:
            RpcTimeoutError: it is neither in time.
        """
        done = threading.Lock()
        done.acquire()
        self._waiting.add(done)
        try:
            if self._left or self.when_settled(ref, done.release):
                return
            check_may_block()
            self.steps.check_may_wait()
            if not wait_for(done, time.monotonic() + timeout if timeout else INFINITE):
                raise RpcTimeoutError(
                    f"RPC ran for more than its timeout of {timeout * 1000:.0f} ms: worker '{owner}', "
                    "the owner, has not confirmed the reference"
                )
        except BaseException:
            self.steps.await_no_more(ref, done.release)
            raise
        finally:
            self._waiting.discard(done)

    def _closed(self) -> None:
        """This worker has left: wake the threads that wait for what will not come."""
        self._left = True
        for lock in self._waiting.copy():
            with contextlib.suppress(RuntimeError):  # it was released just now
                lock.release()
        error = NotInitializedError("RPC has been shut down before the object was made")
        for value in list(self._values.values()):
            value.fail(error)

    # ---- objects

    def arrived(self, rref: RRefId, fork: ForkId, peer: Peer, turns: Turns | None = None) -> Value | None:
        """A creation is here: where its object is to be put; None if it is not wanted."""
        fresh = Value(turns)
        value: Value | None = self.steps.do(self._arrived, rref, fork, fresh, peer.incarnation)
        # If it turns out not to be wanted, it is run in vain.
        return self._values.setdefault(rref, fresh) if value is LEFT else value

    def _arrived(self, rref: RRefId, fork: ForkId, fresh: Value, peer: int) -> Value | None:
        if self._protocol.arrived(rref, fork, peer):
            return self._values.setdefault(rref, fresh)
        if self._values.get(rref) is fresh:
            del self._values[rref]
        return None

    def finished(self, rref: RRefId) -> None:
        """A creation has been run: its object, or its error, is there."""
        self.steps.do(self._protocol.finished, rref)

    def expect(self, rref: RRefId) -> Ref:
        """A local reference to an object that this worker owns or will own, to be released."""
        ref = self._protocol.new_id()
        self.steps.do(self._protocol.expect, rref, ref)
        self._watch_late()
        return ref

    def value(self, rref: RRefId) -> Value:
        """The object of a reference whose owner is this worker; its error if it is not here (any more)."""
        value = self.find(rref)
        if value is None:
            value = Value()
            where = f"is not on worker '{self.workers.own.name}' (any more)"
            value.fail(RRefError(f"the object of RRef({self.id_text(rref)}) {where}"))
        return value

    # ---- debug

    def counts(self) -> dict[str, int]:
        """How much the protocol remembers, by kind (see ``Protocol.counts``), and how many ``objects``."""
        return {**self.steps.ask(self._protocol.counts), "objects": len(self._values)}

    def debug_info(self) -> dict[str, int]:
        """How many objects of this worker are shared, their forks elsewhere, and what waits for an answer."""
        counts = self.counts()
        return {
            "num_owner_rrefs": counts["shared"],
            "num_forks": counts["forks"],
            "num_pending_users": counts["pending_users"] + counts["children"],
            "num_pending_futures": sum(
                isinstance(call, Creation) and call.outcome is None for call in self._under_way.waiting()
            ),
        }

    def observed(self) -> dict[str, Any]:
        """What observers are to know: objects of this worker, and the workers that hold references to them.

        It takes no step of the protocol: a thread that is stopped in one does not stop the observing thread.
        """
        owned = []
        for rref, state, forks in self._protocol.holders(_MAX_OBSERVED):
            value = self._values.get(rref)
            described = {
                "creator": rref[0],
                "number": rref[1],
                "state": state.name,
                "type": "" if value is None else value.type_name,
                "holders": [list(each) for each in forks.items()],
            }
            owned.append(described)
        return {"objects": len(self._values), "owned": owned}

    def check_leaks(self) -> None:
        """Raise ``RRefError`` if other workers still refer to objects of this one."""
        leaks = self.steps.ask(self._protocol.leaks)
        found = {rref: elsewhere for rref, (elsewhere, _) in leaks.items() if elsewhere}
        if found:
            listed = ", ".join(f"{self.id_text(rref)} ({count} forks)" for rref, count in found.items())
            raise RRefError(
                f"Leaking RRef: other workers still refer to objects of '{self.workers.own.name}': {listed}"
            )

    def id_text(self, id_: tuple[int, int]) -> str:
        """An id as people read it, in PyTorch's words."""
        incarnation, number = id_
        creator = self.workers.by_incarnation(incarnation)
        created_on = creator.member.id if creator is not None else f"incarnation {incarnation:x}"
        return f"GloballyUniqueId(created_on={created_on}, local_id={number - 1})"

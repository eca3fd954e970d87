"""The shell around the reference protocol: one per agent. It holds the objects owned here, and turns the
protocol's actions into messages. ``steps`` decides which thread takes a step of the protocol;
``reference_server`` answers the requests that fetch or use an object.

Objects are dropped on an executor thread, since their destructors are user code.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from _thread import LockType
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from rpc.agent.agent_calls import Calls
from rpc.agent.hooks import Hooks
from rpc.errors import NotInitializedError, ProtocolError, RpcTimeoutError, RRefError, is_violation
from rpc.group.control import Control
from rpc.group.peer import Peer, PeerTable
from rpc.group.workers import Member
from rpc.runtime.blocking import INFINITE, check_may_block, wait_for
from rpc.runtime.executor import Executor
from rpc.runtime.interrupts import protected
from rpc.runtime.legible import legible
from rpc.runtime.mailbox import Mailbox
from rpc.serialization.payload import Payload
from rref.creation import Creation
from rref.protocol.machine import Protocol
from rref.protocol.messages import Action, Fence, ForkId, Free, Ref, RRefId, Send, parse_descriptor
from rref.requests import CREATE, name_creation, object_id, turns_of_object
from rref.steps import LEFT, Steps
from rref.turns import Turns
from rref.value import Value

__all__ = ["References"]

logger = logging.getLogger(__name__)

TOPIC: Final = "rref"

_MAX_OBSERVED: Final = 200
"""Maximum number of objects that observers are told; the newest."""

_SWEEP_SECONDS: Final = 60.0

R = TypeVar("R")


class References:
    """The state of remote references on one worker. From any thread, except where noted.

    Args:
        incarnation: incarnation of this worker, which has not joined a group yet.
        calls, workers, control: parts of its agent.
        lose: cuts off a worker; from any thread.

    Attributes:
        calls: makes calls.
        workers: as given.
    """

    def __init__(
        self,
        incarnation: int,
        calls: Calls,
        workers: PeerTable,
        control: Control,
        lose: Callable[[Peer, str], object],
        hooks: Hooks,
        mailbox: Mailbox,
        executor: Executor,
    ) -> None:
        self.calls = calls.caller
        self.workers = workers
        self._under_way = calls.table
        self._requests = calls.requests
        self._control = control
        self._lose = lose
        self._mailbox = mailbox
        self._executor = executor
        self._left = False
        self.released = False
        """Whether all references have been released, or the agent is closing."""
        self.backward: Callable[[Any, int, bool], None] | None = None
        """Runs ``RRef.backward``; distributed autograd sets it, if it is installed."""
        self._futures = threading.RLock()
        """Lock that is held while the future of a creation is made."""
        self._protocol = Protocol(incarnation)
        self.steps = Steps(self._protocol, mailbox, self._act, self._step_failed)
        self.state, self.when_settled = self.steps.state, self.steps.when_settled
        self.reason = self._protocol.reason
        self._values: dict[RRefId, Value] = {}
        self.find: Callable[[RRefId], Value | None] = self._values.get
        """Returns the object of a reference owned by this worker, or None if it is not here (yet, or any
        more).
        """
        self._waiting: set[LockType] = set()
        """Threads that wait for a reference to be settled, each represented by the lock that it waits on."""
        self._sweeps_later = False
        control.on_batch(TOPIC, self._messages_arrived)
        hooks.joined.append(self._peer_joined)
        hooks.gone.append(self._peer_gone)
        hooks.close.append(self._closing)
        hooks.closed.append(self._closed)
        hooks.forked.append(self._closing)
        hooks.release.append(self.release_all)
        hooks.check.append(self.check_leaks)

    # ---- the protocol's actions and inputs

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
            self._watch_late()  # its place may be taken by a tombstone

    def _watch_late(self) -> None:
        """Start the sweep timer if the protocol waits for a late message."""
        if not self._sweeps_later and self._protocol.waits_for_sweep:
            self._mailbox.soon(self._set_sweep_timer, None)

    def _fence(self, which: tuple[int, str]) -> None:
        incarnation, reason = which
        peer = self.workers.by_incarnation(incarnation)
        if peer is not None:
            self._lose(peer, f"another worker found it gone: {reason.rpartition(' is gone: ')[2]}")
        else:  # in a dynamic group, it died before it could introduce itself here: never accept it
            reason = legible(reason)
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
        while messages:
            self._protocol.receive(peer, messages[0])
            del messages[0]

    def _step_failed(self, args: tuple[Any, ...], error: Exception) -> None:
        """Cut off the peer whose message could not be handled in a step that was queued. It is the last
        argument.
        """
        peer = self.workers.by_incarnation(args[-1])
        if peer is None:
            logger.error("a step of the reference protocol failed", exc_info=error)
            return
        if is_violation(error):
            reason = f"it sent a malformed message: {error}"
        else:
            reason = f"this worker could not handle a message from it: {type(error).__name__}: {error}"
        self._mailbox.call(self._lose, peer, reason)

    # ---- creating and releasing references

    def own(self, content: Any) -> tuple[RRefId, Ref]:
        """Register an object of this worker that references refer to."""
        rref = self._protocol.new_id()
        self._values[rref] = Value.of(content, self._requests.border.work_on_object())
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
        """Have an object created on a worker, which may be this one.

        Args:
            target: added to the payload's header: what to call, if it is a method; see ``RRef``.
            timeout: timeout in seconds, 0 for no limit.
            bind: makes the user's object, which releases the reference when it is destroyed.
        """
        rref, fork = self._protocol.new_id(), self._protocol.new_id()
        payload.header.update(target)
        if peer.is_self:
            self._values[rref] = Value(turns_of_object(payload.header))
        self.steps.do(self._protocol.create, peer.incarnation, rref, fork)
        name_creation(payload, rref, fork)
        creation = self._under_way.open(peer, what, timeout, Creation, payload.header, "remote")
        ended = partial(self._creation_ended, peer.incarnation, rref, fork)
        creation.begin(ended, self._futures)
        try:
            self.calls.transmit(creation, CREATE, payload)
        except BaseException as error:  # such as KeyboardInterrupt, while the send queue is full
            self._under_way.drop(creation)
            ended(f"it could not be sent: {error}")
            self.release(fork)
            raise
        self._under_way.watch(creation)
        return bind(self, peer, rref, fork, creation)

    def _creation_ended(self, owner: int, rref: RRefId, fork: ForkId, failure: str | None) -> None:
        """Record that the owner has answered a creation, or why it has failed."""
        if failure is None:
            take = self.steps.do if self.steps.is_awaited(fork) else self.steps.later
            take(self._protocol.created, owner, rref, fork)
        else:
            self.steps.do(self._protocol.creation_failed, owner, rref, fork, failure)
            self._watch_late()

    def fork(self, rref: RRefId, ref: Ref, owner: Peer, to: Peer) -> list[Any]:
        """Return a descriptor for a message to ``to``."""
        fork = self._protocol.new_id()
        self.steps.do(self._protocol.fork, ref, to.incarnation, fork)
        return [owner.incarnation, rref, fork]

    def take_back(self, descriptor: Any) -> None:
        """Record that the message with this descriptor was not sent."""
        owner, rref, fork = descriptor
        self.steps.do(self._protocol.take_back, (owner, tuple(rref), tuple(fork)))

    def adopt(self, descriptor: Any, source: Peer) -> Ref:
        """Take the descriptor from a message that arrived."""
        ref = parse_descriptor(descriptor)[2]
        self.steps.do(self._protocol.adopt, descriptor, source.incarnation)
        self._watch_late()
        return ref

    def gone_owner(self, member: Member, reason: str) -> Peer:
        """Register the owner of a reference that is gone and not known here: references to its objects have
        failed.
        """
        self.steps.do(
            self._protocol.peer_lost, member.incarnation, f"worker '{member.name}' is gone: {reason}"
        )
        return self.workers.gone(member, reason)

    def release(self, ref: Ref) -> None:
        """Release a reference whose last Python object is gone. Safe in finalizers."""
        self.steps.later(self._protocol.release, ref)

    def _closing(self) -> None:
        self.released = True

    def release_all(self) -> None:
        """Release every reference to objects of other workers, for a graceful shutdown."""
        self.released = True
        self.steps.catch_up()
        self.steps.do(self._protocol.release_all)

    def wait_settled(self, ref: Ref, timeout: float, missing: str) -> None:
        """Wait until a reference is confirmed or failed.

        Args:
            missing: what has not happened if it is not, for the error.

        Raises:
            RpcTimeoutError: it is neither confirmed nor failed in time.
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
                    f"RPC ran for more than its timeout of {timeout * 1000:.0f} ms: {missing}"
                )
        except BaseException:
            self.steps.await_no_more(ref, done.release)
            raise
        finally:
            self._waiting.discard(done)

    def _closed(self) -> None:
        """Wake the threads that wait for objects or confirmations: this worker has left the group."""
        self._left = True
        for lock in self._waiting.copy():
            with contextlib.suppress(RuntimeError):  # another thread has just released it
                lock.release()
        error = NotInitializedError("RPC has been shut down before the object was made")
        for value in list(self._values.values()):
            value.fail(error)

    # ---- objects

    def arrived(self, rref: RRefId, fork: ForkId, peer: Peer, turns: Turns | None = None) -> Value | None:
        """Handle a creation that arrived: return the ``Value`` for its object, or None if it is not
        wanted.
        """
        fresh = Value(turns)
        value: Value | None = self.steps.do(self._arrived, rref, fork, fresh, peer.incarnation)
        # If it turns out not to be wanted, it is run although its value is not used.
        return self._values.setdefault(rref, fresh) if value is LEFT else value

    def _arrived(self, rref: RRefId, fork: ForkId, fresh: Value, peer: int) -> Value | None:
        # It is there before the reference is confirmed: another thread may look for it from then on.
        value = self._values.setdefault(rref, fresh)
        if self._protocol.arrived(rref, fork, peer):
            return value
        if self._values.get(rref) is fresh:
            del self._values[rref]
        return None

    def finished(self, rref: RRefId) -> None:
        """Record that a creation has been run: its object, or its error, is set."""
        self.steps.do(self._protocol.finished, rref)

    def expect(self, rref: RRefId) -> Ref:
        """Return a local reference to an object that this worker owns or will own; the caller releases it."""
        ref = self._protocol.new_id()
        self.steps.do(self._protocol.expect, rref, ref)
        self._watch_late()
        return ref

    def value(self, rref: RRefId) -> Value:
        """Return the object of a reference owned by this worker; with an error if it is not here
        (any more).
        """
        value = self.find(rref)
        if value is None:
            value = Value()
            where = f"is not on worker '{self.workers.own.name}' (any more)"
            value.fail(RRefError(f"the object of RRef({self.id_text(rref)}) {where}"))
        return value

    # ---- debug

    def counts(self) -> dict[str, int]:
        """Return the number of the protocol's entries by kind (see ``Protocol.counts``), and of
        ``objects``.
        """
        return {**self.steps.ask(self._protocol.counts), "objects": len(self._values)}

    def debug_info(self) -> dict[str, int]:
        """Return the number of shared objects of this worker, of their forks, and of pending answers."""
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
                "bytes": 0 if value is None else value.tensor_bytes,
                "holders": [list(each) for each in forks.items()],
            }
            owned.append(described)
        return {"objects": len(self._values), "owned": owned}

    def method_in_words(self, header: dict[str, Any]) -> str:
        """Describe the method that a request calls, as "Server.pull", for observers; "" if it calls none, or
        its object is not here.
        """
        method, value = header.get("method"), None
        if isinstance(method, str):
            with contextlib.suppress(ProtocolError):
                value = self._values.get(object_id(header) or (0, 0))
        return f"{value.type_name}.{method}" if value is not None and value.type_name else ""

    def check_leaks(self) -> None:
        """Raise ``RRefError`` if other workers still refer to objects of this one."""
        leaks = self.steps.ask(self._protocol.leaks)
        found = {rref: elsewhere for rref, (elsewhere, _) in leaks.items() if elsewhere}
        if found:
            listed = ", ".join(f"{self.id_text(rref)} ({count} forks)" for rref, count in found.items())
            raise RRefError(
                f"Leaking RRef: other workers still refer to objects of '{self.workers.own.name}': {listed}"
            )

    def object_in_words(self, rref: RRefId) -> str:
        """Describe an object of unknown type by its creator and number, as observers do."""
        creator = self.workers.by_incarnation(rref[0])
        return "an object" if creator is None else f"object {creator.name} #{rref[1]}"

    def id_text(self, id_: tuple[int, int]) -> str:
        """Format an id in the way that PyTorch does."""
        incarnation, number = id_
        creator = self.workers.by_incarnation(incarnation)
        created_on = creator.member.id if creator is not None else f"incarnation {incarnation:x}"
        return f"GloballyUniqueId(created_on={created_on}, local_id={number - 1})"

"""The shell round the reference protocol: one per agent. It holds the objects owned here, and turns the
protocol's actions into messages. Who serves those who fetch or use an object is ``serving``.

The protocol and the table of values are guarded by one lock, under which nothing is sent, nobody is called
back, and no user code runs; the actions are done after it is let go. Those that steps of the main thread ask
for are left to the loop, where no Ctrl-C comes. Garbage is not collected during a step: a finalizer of the
user's may use references, and would come back into the middle of it. Objects are dropped on an executor
thread, since their destructors are user code.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from _thread import LockType
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from rpc.agent.agent import Agent
from rpc.errors import NotInitializedError, RpcTimeoutError, RRefError
from rpc.group.peer import Peer
from rpc.runtime.blocking import INFINITE, check_may_block, wait_for
from rpc.serialization.payload import Payload
from rref.creation import Creation
from rref.protocol.machine import Protocol
from rref.protocol.messages import Action, Confirmed, Failed, Fence, ForkId, Free, Ref, RRefId, Send, State
from rref.requests import CREATE, name_creation
from rref.value import Value

__all__ = ["References"]

TOPIC: Final = "rref"

_SWEEP_SECONDS: Final = 60.0

R = TypeVar("R")


class References:
    """All that one worker knows of remote references. From any thread, except where noted.

    Args:
        agent: of this worker, before it joins a group.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.released = False
        """Whether a graceful shutdown has taken all references away."""
        self._protocol = Protocol(agent.incarnation)
        self.lock = threading.RLock()  # right before and after a step, a finalizer may come back here
        self._collecting = gc.isenabled()
        """Whether garbage was collected before the step that is on."""
        self._values: dict[RRefId, Value] = {}
        self._later: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        """Steps that are in no hurry; whoever does another one does these first."""
        self._awaiting: dict[Ref, list[Callable[[], object]]] = {}
        self._waiting: set[LockType] = set()
        """Threads that wait for a reference to be settled, each on its lock."""
        self._sweep_timer: asyncio.TimerHandle | None = None
        agent.control.on_batch(TOPIC, self._messages_arrived)
        agent.on_joined(self._peer_joined)
        agent.on_gone(self._peer_gone)
        agent.on_closed(self._closed)
        agent.on_forked(self._forked)

    # ---- the protocol

    def _do(self, step: Callable[..., Any], *args: Any) -> Any:
        """One step of the protocol, after those that wait, and the actions that they ask for."""
        if self._later:
            self._do_alone(self._catch_up)
        return self._do_alone(step, *args)

    def _do_alone(self, step: Callable[..., Any], *args: Any) -> Any:
        """As ``_do``, for a step to which it makes no difference whether it comes before those that wait."""
        actions: list[Action] = []
        interruptible = threading.get_ident() == threading.main_thread().ident
        try:
            with self.lock:
                self._collecting = gc.isenabled()
                try:
                    gc.disable()
                    result = step(*args)
                    if not interruptible:
                        actions = self._protocol.take_actions()
                finally:
                    if self._collecting:
                        gc.enable()
            if interruptible and self._protocol.has_actions:
                self.agent.mailbox.soon(self._act_on_loop, None)
        except BaseException:  # Ctrl-C: what the step asked for is still to be done
            self.agent.mailbox.soon(self._act_on_loop, None)
            raise
        if actions:
            self._act(actions)
        return result

    def _act_on_loop(self, _: None) -> None:
        self._do_alone(_nothing)

    def _do_later(self, step: Callable[..., Any], *args: Any) -> None:
        """Have a step done soon, before any that depends on it. Safe in finalizers."""
        self._later.append((step, args))
        self.agent.mailbox.gathered(self._do_gathered, None)

    def _do_gathered(self, _: None) -> None:
        if self._later:
            self._do_alone(self._catch_up)

    def _catch_up(self) -> None:
        while self._later:
            step, args = self._later.popleft()
            step(*args)

    def _act(self, actions: list[Action]) -> None:
        freed: list[Value] = []
        for action in actions:
            match action:
                case Send(incarnation, message):
                    peer = self.agent.peer_by_incarnation(incarnation)
                    if peer is not None:
                        self.agent.control.post(peer, TOPIC, message)
                case Confirmed(ref) | Failed(ref, _):
                    with self.lock:  # nobody takes a callback out meanwhile
                        callbacks = self._awaiting.pop(ref, ())
                    for callback in callbacks:
                        callback()
                case Free(rref):
                    value = self._values.pop(rref, None)
                    if value is not None:
                        freed.append(value)
                        del value
                case Fence(incarnation, reason):
                    peer = self.agent.peer_by_incarnation(incarnation)
                    if peer is not None:
                        self.agent.mailbox.soon(self._fence, (peer, reason))
                    else:
                        self.agent.mailbox.soon(self._never_met, (incarnation, reason))
        if freed:
            self.agent.executor.submit((_drop, freed))
        if self._protocol.waits_for_sweep and self._sweep_timer is None:
            self.agent.mailbox.soon(self._set_sweep_timer, None)

    def _fence(self, which: tuple[Peer, str]) -> None:
        peer, reason = which
        self.agent.connections.lose(peer, f"another worker found it gone: {reason}")

    def _never_met(self, which: tuple[int, str]) -> None:
        """In a dynamic group, a worker died before it came to introduce itself here: keep it out."""
        incarnation, reason = which
        if self.agent.peer_by_incarnation(incarnation) is None:
            self.agent.view.leave(incarnation, reason)
            self._do(self._protocol.peer_lost, incarnation, reason)

    def _set_sweep_timer(self, _: None) -> None:
        if self._sweep_timer is None:
            self._sweep_timer = self.agent.loop.call_later(_SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        self._sweep_timer = None
        self._do(self._protocol.sweep)
        if self._protocol.waits_for_sweep:
            self._set_sweep_timer(None)

    def _peer_joined(self, peer: Peer) -> None:
        self._do(self._protocol.peer_joined, peer.incarnation)

    def _peer_gone(self, peer: Peer, reason: str) -> None:
        self._do(self._protocol.peer_lost, peer.incarnation, f"worker '{peer.name}' is gone: {reason}")

    def _messages_arrived(self, peer: Peer, messages: list[Any]) -> None:
        self._do(self._receive, peer.incarnation, messages)

    def _receive(self, peer: int, messages: list[Any]) -> None:
        for message in messages:
            self._protocol.receive(peer, message)

    # ---- beginnings and ends

    def own(self, content: Any) -> tuple[RRefId, Ref]:
        """An object of this worker that is to be referred to."""
        ref: Ref = self._do(self._own, content)
        return ref, ref

    def _own(self, content: Any) -> Ref:
        ref = self._protocol.own()
        self._values[ref] = Value.of(content)
        return ref

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
            target: added to the payload's header: what to call, if it is a method; see ``target_of``.
            timeout: seconds, 0 for none.
            bind: makes what the user gets, which releases the reference in the end.
        """
        agent = self.agent
        made: list[tuple[RRefId, Ref]] = []
        creation: Creation | None = None
        try:
            self._do_alone(self._create, peer, made)
            [(rref, fork)] = made
            payload.header.update(target)
            name_creation(payload, rref, fork)
            creation = agent.calls.open(peer, what, timeout, Creation)
            creation.begin(self, rref, fork)
            agent.caller.transmit(creation, CREATE, payload)
            agent.calls.watch(creation)
            return bind(self, peer, rref, fork, creation)
        except BaseException as error:  # such as Ctrl-C: nobody gets the reference
            for rref, fork in made:
                if creation is None or not creation.sent:
                    if creation is not None:
                        agent.caller.drop(creation)
                    self.creation_failed(peer.incarnation, rref, fork, f"it could not be sent: {error}")
                self.release(fork)
            raise

    def _create(self, peer: Peer, made: list[tuple[RRefId, Ref]]) -> None:
        made.append(self._protocol.create(peer.incarnation))
        if peer.is_self:
            [(rref, _)] = made
            self._values[rref] = Value()

    def created(self, owner: int, rref: RRefId, fork: ForkId) -> None:
        """The owner has answered a creation."""
        do = self._do if fork in self._awaiting else self._do_later
        do(self._protocol.created, owner, rref, fork)

    def creation_failed(self, owner: int, rref: RRefId, fork: ForkId, reason: str) -> None:
        """A creation timed out, or could not be sent."""
        self._do(self._protocol.creation_failed, owner, rref, fork, reason)

    def fork(self, ref: Ref, to: Peer) -> list[Any]:
        """A descriptor for a message to ``to``."""
        owner, rref, fork = self._do(self._protocol.fork, ref, to.incarnation)
        return [owner, rref, fork]

    def take_back(self, descriptor: Any) -> None:
        """The message with this descriptor was not sent."""
        owner, rref, fork = descriptor
        self._do(self._protocol.take_back, (owner, tuple(rref), tuple(fork)))

    def adopt(self, descriptor: Any, source: Peer) -> Ref:
        """Take in a descriptor that came with a message."""
        ref: Ref = self._do(self._protocol.adopt, descriptor, source.incarnation)
        return ref

    def release(self, ref: Ref) -> None:
        """The last Python object of a reference is gone. Safe in finalizers."""
        self._do_later(self._protocol.release, ref)

    def release_all(self) -> None:
        """For a graceful shutdown: give back everything that this worker refers to elsewhere."""
        self.released = True
        self._do(self._protocol.release_all)

    # ---- states

    def state(self, ref: Ref) -> State:
        state: State = self._do(self._protocol.state, ref)
        return state

    def reason(self, ref: Ref) -> str:
        reason: str = self._do(self._protocol.reason, ref)
        return reason

    def when_settled(self, ref: Ref, callback: Callable[[], object]) -> bool:
        """Whether a reference is confirmed or failed; if not, ``callback`` is called when it is."""
        settled: bool = self._do(self._await, ref, callback)
        return settled

    def _await(self, ref: Ref, callback: Callable[[], object]) -> bool:
        if self._protocol.state(ref) is not State.PENDING:
            return True
        self._awaiting.setdefault(ref, []).append(callback)
        return False

    def _await_no_more(self, ref: Ref, callback: Callable[[], object]) -> None:
        callbacks = self._awaiting.get(ref, [])
        if callback in callbacks:
            callbacks.remove(callback)
            if not callbacks:
                del self._awaiting[ref]

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
            if self.agent.closed or self.when_settled(ref, done.release):
                return
            check_may_block()
            if not wait_for(done, time.monotonic() + timeout if timeout else INFINITE):
                raise RpcTimeoutError(
                    f"RPC ran for more than its timeout of {timeout * 1000:.0f} ms: worker '{owner}', "
                    "the owner, has not confirmed the reference"
                )
        except BaseException:
            self._do_alone(self._await_no_more, ref, done.release)
            raise
        finally:
            self._waiting.discard(done)

    def _closed(self) -> None:
        """This worker has left: wake who waits for what will not come."""
        for lock in self._waiting.copy():
            with contextlib.suppress(RuntimeError):  # it was released just now
                lock.release()
        error = NotInitializedError("RPC has been shut down before the object was made")
        for value in list(self._values.values()):
            if not value.is_ready:
                value.fail(error)

    def _forked(self) -> None:
        """In a child: if a thread that is not here was in a step, undo what it did to the process."""
        if self.lock.acquire(blocking=False):
            self.lock.release()
            return
        self.lock = threading.RLock()
        if self._collecting:
            gc.enable()

    # ---- objects

    def arrived(self, rref: RRefId, fork: ForkId, peer: Peer) -> Value | None:
        """A creation is here: where its object is to be put; None if it is not wanted."""
        value: Value | None = self._do_alone(self._arrived, rref, fork, peer)
        return value

    def _arrived(self, rref: RRefId, fork: ForkId, peer: Peer) -> Value | None:
        wanted = self._protocol.arrived(rref, fork, peer.incarnation)
        return self._values.setdefault(rref, Value()) if wanted else None

    def finished(self, rref: RRefId) -> None:
        """A creation has been run: its object, or its error, is there."""
        self._do_alone(self._protocol.finished, rref)

    def expect(self, rref: RRefId) -> Ref:
        """A local reference to an object that this worker owns or will own, to be released."""
        ref: Ref = self._do(self._protocol.expect, rref)
        return ref

    def find(self, rref: RRefId) -> Value | None:
        """The object of a reference whose owner is this worker; None if it is not here (any more, or yet)."""
        return self._values.get(rref)

    def _missing(self, rref: RRefId) -> Value:
        missing = Value()
        me = self.agent.info.name
        missing.fail(
            RRefError(f"the object of RRef({self.id_text(rref)}) is not on worker '{me}' (any more)")
        )
        return missing

    def value(self, rref: RRefId) -> Value:
        """The object of a reference whose owner is this worker; its error if it is not here (any more)."""
        return self._values.get(rref) or self._missing(rref)

    # ---- looking in

    def debug_info(self) -> dict[str, int]:
        """How many objects of this worker are shared, their forks elsewhere, and what waits for an answer."""
        counts = self._do(self._protocol.counts)
        return {
            "num_owner_rrefs": counts["shared"],
            "num_forks": counts["forks"],
            "num_pending_users": counts["pending_users"] + counts["children"],
            "num_pending_futures": sum(
                isinstance(call, Creation) and call.outcome is None for call in self.agent.calls.waiting()
            ),
        }

    def check_leaks(self) -> None:
        """Raise ``RRefError`` if other workers still refer to objects of this one."""
        leaks = self._do(self._protocol.leaks)
        found = {rref: elsewhere for rref, (elsewhere, _) in leaks.items() if elsewhere}
        if found:
            listed = ", ".join(f"{self.id_text(rref)} ({count} forks)" for rref, count in found.items())
            raise RRefError(
                f"Leaking RRef: other workers still refer to objects of '{self.agent.info.name}': {listed}"
            )

    def id_text(self, id_: tuple[int, int]) -> str:
        """An id as people read it, in PyTorch's words."""
        incarnation, number = id_
        creator = self.agent.peer_by_incarnation(incarnation)
        created_on = creator.member.id if creator is not None else f"incarnation {incarnation:x}"
        return f"GloballyUniqueId(created_on={created_on}, local_id={number - 1})"


def _nothing() -> None:
    """A step that only has actions taken."""


def _drop(content: list[Any]) -> None:
    """Let go of objects on this thread, where their destructors may do what they like."""
    content.clear()

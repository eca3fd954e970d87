"""The shell round the reference protocol: one per agent. It holds the objects owned here, turns the
protocol's actions into messages, and serves those who fetch or use an object.

The protocol and the table of values are guarded by one lock, under which nothing is sent, nobody is called
back, and no user code runs; the actions are done after it is let go. Garbage is not collected meanwhile: a
finalizer of the user's may use references, and would come back into the middle of a step. Objects are
dropped on an executor thread, since their destructors are user code.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from _thread import LockType
from collections.abc import Callable
from typing import Any, Final

from rpc import serialization
from rpc.agent import Agent
from rpc.callee import LATER, Request
from rpc.errors import NotInitializedError, ProtocolError, RpcTimeoutError, RRefError, SerializationError
from rpc.executor import Task
from rpc.futures import INFINITE, check_may_block, wait_for
from rpc.peer import Peer
from rpc.serialization import Payload
from rpc.wire import Frame, Kind
from rref.creation import Creation
from rref.messages import Confirmed, Failed, Fence, ForkId, Free, Ref, RRefId, Send, State
from rref.protocol import Protocol
from rref.value import Value

__all__ = ["CREATE", "FETCH", "INVOKE", "References", "method_of_object"]

CREATE: Final = Kind.EXTENSION
FETCH: Final = Kind.EXTENSION + 1
INVOKE: Final = Kind.EXTENSION + 2
TOPIC: Final = "rref"

_SWEEP_SECONDS: Final = 60.0


def method_of_object(*args: Any, **kwargs: Any) -> Any:
    """Stands, in a message, for the method that the header names, of the object that it names."""
    raise TypeError("the method of a remote object is called on its owner, in a message that names both")


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
        self._values: dict[RRefId, Value] = {}
        self._awaiting: dict[Ref, list[Callable[[], object]]] = {}
        self._waiting: set[LockType] = set()
        """Threads that wait for a reference to be settled, each on its lock."""
        self._sweep_timer: asyncio.TimerHandle | None = None
        serialization.allow_function(method_of_object)
        agent.on(CREATE, self._creation_arrived)
        agent.on(FETCH, self._fetch_arrived)
        agent.on(INVOKE, self._invocation_arrived)
        agent.control.on(TOPIC, self._message_arrived)
        agent.on_joined(self._peer_joined)
        agent.on_gone(self._peer_gone)
        agent.on_closed(self._closed)

    # ---- the protocol

    def _do(self, step: Callable[..., Any], *args: Any) -> Any:
        """One step of the protocol, and the actions that it asks for."""
        with self.lock:
            collecting = gc.isenabled()
            try:
                gc.disable()
                result = step(*args)
                actions = self._protocol.take_actions()
            finally:
                if collecting:
                    gc.enable()
        if actions:
            self._act(actions)
        return result

    def _act(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Send(incarnation, message):
                    peer = self.agent.peer_by_incarnation(incarnation)
                    if peer is not None:
                        self.agent.control.post(peer, TOPIC, message)
                case Confirmed(ref) | Failed(ref, _):
                    for callback in self._awaiting.pop(ref, ()):
                        callback()
                case Free(rref):
                    value = self._values.pop(rref, None)
                    if value is not None:
                        self.agent.executor.submit((_drop, [value]))
                        del value
                case Fence(incarnation, reason):
                    peer = self.agent.peer_by_incarnation(incarnation)
                    if peer is not None:
                        self.agent.deferred.soon(self._fence, (peer, reason))
                    else:
                        self.agent.deferred.soon(self._never_met, (incarnation, reason))
        if self._protocol.waits_for_sweep and self._sweep_timer is None:
            self.agent.deferred.soon(self._set_sweep_timer, None)

    def _fence(self, which: tuple[Peer, str]) -> None:
        peer, reason = which
        self.agent.links.lose(peer, f"another worker found it gone: {reason}")

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

    def _message_arrived(self, peer: Peer, message: Any) -> None:
        self._do(self._protocol.receive, peer.incarnation, message)

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
        self, peer: Peer, target: dict[str, Any], payload: Payload, timeout: float, what: object
    ) -> tuple[RRefId, Ref, Creation]:
        """Have an object made on a worker, this one included.

        Args:
            target: added to the payload's header: what to call, if it is a method; see ``target_of``.
        """
        rref, fork = self._do(self._create, peer)
        payload.header.update(target)
        payload.header["create"] = [rref, fork]
        agent = self.agent
        if agent.interceptors:
            agent.attach(payload.header, peer)

        creation = agent.calls.open(peer, what, agent.effective_timeout(timeout), Creation)
        creation.begin(self, rref, fork)
        try:
            agent.transmit(creation, CREATE, payload)
        except BaseException as error:
            self.creation_failed(fork, f"it could not be sent: {error}")
            raise
        agent.calls.watch(creation)
        return rref, fork, creation

    def _create(self, peer: Peer) -> tuple[RRefId, Ref]:
        rref, fork = self._protocol.create(peer.incarnation)
        if peer.is_self:
            self._values[rref] = Value()
        return rref, fork

    def created(self, owner: int, rref: RRefId, fork: ForkId) -> None:
        """The owner has answered a creation."""
        self._do(self._protocol.created, owner, rref, fork)

    def creation_failed(self, fork: ForkId, reason: str) -> None:
        """A creation timed out, or could not be sent."""
        self._do(self._protocol.creation_failed, fork, reason)

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
        """The last Python object of a reference is gone. On the loop's thread."""
        self._do(self._protocol.release, ref)

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
            settled = wait_for(done, time.monotonic() + timeout if timeout else INFINITE)
        finally:
            self._waiting.discard(done)
        if not settled:
            raise RpcTimeoutError(
                f"RPC ran for more than its timeout of {timeout * 1000:.0f} ms: worker '{owner}', the owner, "
                "has not confirmed the reference"
            )

    def _closed(self) -> None:
        """This worker has left: wake who waits for what will not come."""
        for lock in self._waiting.copy():
            with contextlib.suppress(RuntimeError):  # it was released just now
                lock.release()
        error = NotInitializedError("RPC has been shut down before the object was made")
        for value in list(self._values.values()):
            if not value.is_ready:
                value.fail(error)

    # ---- serving: handlers run on the loop's thread, ``_run_...`` on executor threads

    def _creation_arrived(self, peer: Peer, frame: Frame) -> None:
        rref, fork = _ids(frame.header.get("create"))
        arrivals = serialization.adopt(frame.header, peer)
        value = self._do(self._arrived, rref, fork, peer)
        request = Request(peer, frame, arrivals)
        if value is None:
            refusal = serialization.dump_exception(RRefError("its creator gave it up"), self.agent.info)
            refusal.header["refused"] = "its creator gave it up"
            self._accept(request, lambda _: self.agent.answer(peer, Kind.FAILURE, frame.call_id, refusal))
            return
        target = frame.header.get("object")
        if target is None:
            self._accept(request, lambda _: self._run_creation(request, rref, value, None))
        else:
            self._accept_on_object(
                request, _id(target), lambda on: self._run_creation(request, rref, value, on)
            )

    def _arrived(self, rref: RRefId, fork: ForkId, peer: Peer) -> Value | None:
        """Where the object of a creation is to be put; None if it is not wanted."""
        wanted = self._protocol.arrived(rref, fork, peer.incarnation)
        return self._values.setdefault(rref, Value()) if wanted else None

    def _accept(self, request: Request, run: Callable[[Request], None]) -> None:
        tasks: list[Task] = []
        self.agent.accept(request, run, tasks)
        self.agent.executor.submit_batch(tasks)

    def _accept_on_object(
        self, request: Request, target: RRefId, run: Callable[[Value], None], *, quick: bool = False
    ) -> None:
        """Run a request once the object that it is for is there. The object stays until it has run.

        Args:
            quick: it calls no method of the object: the thread that makes the object may run it.
        """
        value = self._values.get(target)
        if value is not None:
            if value.is_ready or not self._accept_when_made(request, value, run, quick):
                self._accept(request, lambda _: run(value))
            return
        ref = self._do(self._protocol.expect, target)

        def run_and_release(_: Request) -> None:
            try:
                run(self._values.get(target) or self._missing(target))
            finally:
                self.agent.deferred.soon(self.release, ref)

        def known() -> None:
            value = self._values.get(target) or self._missing(target)
            if value.when_ready(accept):
                accept()

        def accept() -> None:
            self._accept(request, run_and_release)

        if self.when_settled(ref, known):
            known()

    def _accept_when_made(
        self, request: Request, value: Value, run: Callable[[Value], None], quick: bool
    ) -> bool:
        """Run a request as soon as the object is there; false if it has just come."""
        postponed = self.agent.postponed
        self.agent.requests_begun += 1
        postponed.begin()

        def made() -> None:
            try:
                if quick:
                    run(value)
                else:
                    self._accept(request, lambda _: run(value))
            finally:
                postponed.end()
                self.agent.something_ended()

        if value.when_ready(made):
            postponed.end()
            return False
        return True

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

    def _load(
        self, request: Request, on: Value | None
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """What a request is to call: a function, or a method of the object that it is for."""
        function, args, kwargs = self.agent.callee.load(request)
        if on is not None:
            name = request.frame.header.get("method")
            if function is not method_of_object or not isinstance(name, str):
                raise ProtocolError(f"asked to call {function!r}, as {name!r}, of an object")
            if self.agent.allow is not None and name.startswith("_") and name != "__call__":
                raise SerializationError(f"safe mode does not admit calls of the private method '{name}'")
            function = getattr(on.get(), name)
        return function, args, kwargs

    def _run_creation(self, request: Request, rref: RRefId, value: Value, on: Value | None) -> None:
        peer, frame, _ = request
        agent = self.agent

        def answer(content: Any, error: BaseException | None) -> None:
            if error is None:
                value.set(content)
            else:
                value.fail(error)
            del content
            self._do(self._protocol.finished, rref)
            if error is None:
                agent.reply(peer, frame.call_id, None)
            else:
                agent.fail(peer, frame.call_id, error)

        try:
            function, args, kwargs = self._load(request, on)
            content = agent.callee.start(function, args, kwargs, frame.header, peer, answer)
        except BaseException as error:
            answer(None, error)
        else:
            if content is not LATER:
                answer(content, None)

    def _fetch_arrived(self, peer: Peer, frame: Frame) -> None:
        def run(value: Value) -> None:
            if value.error is not None:
                self.agent.fail(peer, frame.call_id, value.error)
                return
            content = value.get()
            if "type" in frame.header:
                content = type(content)
            self.agent.reply(peer, frame.call_id, content, "the object")

        self._accept_on_object(Request(peer, frame, None), _id(frame.header.get("object")), run, quick=True)

    def _invocation_arrived(self, peer: Peer, frame: Frame) -> None:
        request = Request(peer, frame, serialization.adopt(frame.header, peer))

        def run(value: Value) -> None:
            if value.error is not None:
                self.agent.fail(peer, frame.call_id, value.error)
                return
            callee = self.agent.callee
            try:
                function, args, kwargs = self._load(request, value)
                result = callee.start(function, args, kwargs, frame.header, peer, callee.replier(request))
            except BaseException as error:
                self.agent.fail(peer, frame.call_id, error)
            else:
                if result is not LATER:
                    self.agent.reply(peer, frame.call_id, result, function)

        self._accept_on_object(request, _id(frame.header.get("object")), run)

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


def _drop(content: list[Any]) -> None:
    """Let go of objects on this thread, where their destructors may do what they like."""
    content.clear()


def _id(value: Any) -> tuple[int, int]:
    match value:
        case [int(creator), int(number)]:
            return creator, number
    raise ProtocolError(f"a message names an object by {str(value)[:80]}, which is no id")


def _ids(value: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    match value:
        case [rref, fork]:
            return _id(rref), _id(fork)
    raise ProtocolError(f"a creation names itself by {str(value)[:80]}")

"""The owner's side of requests: objects are created and fetched, and their methods called.

A handler runs on the thread that read the request, and submits it to an executor thread once its dependencies
are there: the references that came with it are confirmed, and the object that it uses is created.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from rpc.agent.activity import Activity
from rpc.agent.agent_calls import Calls
from rpc.agent.messages import Messages
from rpc.agent.received_requests import LATER, Answer, Call, Request
from rpc.agent.tape import Observation, Recording
from rpc.errors import ProtocolError, RRefError, with_article
from rpc.group.peer import Peer
from rpc.runtime.executor import Executor
from rpc.runtime.tasks import Task
from rpc.serialization.serializer import Serializer
from rpc.transport.base import INFINITE, SMALL_BYTES
from rpc.wire.frames import Frame, Kind
from rref.delayed_answers import DelayedAnswers
from rref.names import Names, check_object_name
from rref.protocol.messages import RRefId
from rref.references import References
from rref.requests import (
    CREATE,
    FETCH,
    INVOKE,
    creation,
    fetched_id,
    method_of_object,
    object_id,
    turns_of_object,
)
from rref.turns import Turns
from rref.value import Fetch, Value

__all__ = ["ReferenceServer"]

logger = logging.getLogger(__name__)

_GIVEN_UP: Final = "its creator gave it up"


class ReferenceServer:
    """Answers requests for the objects of one agent.

    Args:
        references: the references of this worker, which has not joined a group yet.
        names: the names of its objects.
        calls, messages: parts of its agent.
        activity: counts the requests that wait for an object.
        recording_of: see ``Tracing.recording_of``.
        delayed: the answers to creations.
    """

    def __init__(
        self,
        references: References,
        names: Names,
        calls: Calls,
        messages: Messages,
        activity: Activity,
        executor: Executor,
        serializer: Serializer,
        recording_of: Callable[[dict[str, Any], Peer], Recording | Observation | None],
        delayed: DelayedAnswers,
    ) -> None:
        self._references = references
        self._names = names
        self._requests = calls.requests
        self._answers = calls.answers
        self._activity = activity
        self._executor = executor
        self._serializer = serializer
        self._recording_of = recording_of
        self._delayed = delayed
        self._waiting: dict[Request, tuple[RRefId, Value]] = {}
        """Creations that wait for the object whose method they call, and what they are to create."""
        serializer.allow_function(method_of_object)
        messages.on(CREATE, self._creation_arrived, any_thread=True)
        messages.on(FETCH, self._fetch_arrived, any_thread=True)
        messages.on(INVOKE, self._invocation_arrived, any_thread=True)

    def _creation_arrived(self, peer: Peer, frame: Frame) -> Task | None:
        rref, fork, call = creation(frame, peer.incarnation)
        if peer.reader is not None:
            peer.reader.expected = True  # many a creator fetches the object at once
        header = call.header
        request = Request(peer, call, self._serializer.adopt(header, peer))
        value = self._references.arrived(rref, fork, peer, turns_of_object(header) if header else None)
        if value is None:
            refusal = self._serializer.dump_exception(
                RRefError(_GIVEN_UP), self._references.workers.own.name, codec=peer.codec.id
            )
            refusal.header["refused"] = _GIVEN_UP
            return self._requests.accept(
                request, lambda _: self._answers.answer(peer, Kind.FAILURE, frame.call_id, refusal)
            )
        value.creation = peer, frame.call_id
        target = object_id(header) if header else None
        if target is None:
            return self._requests.accept(request, lambda _: self._run_creation(request, rref, value, None))
        self._waiting[request] = rref, value
        task = self._accept_on_object(
            request, target, lambda on: self._run_creation(request, rref, value, on)
        )
        if peer.lost is not None:  # before it was among those that wait
            self._stop_waiting(request)
        return task

    def peer_gone(self, peer: Peer, reason: str) -> None:
        """Fail the creations of a lost worker that wait for an object, which may wait for them in turn."""
        for request in list(self._waiting):
            if request.peer is peer:
                self._executor.submit((self._stop_waiting, request))

    def _stop_waiting(self, request: Request) -> None:
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            rref, value = waiting
            parked = value.fail(request.peer.lost_error())
            self._references.finished(rref)
            self._answer_parked(parked, value)

    def _accept_later(self, request: Request, run: Callable[[Request], None]) -> None:
        task = self._requests.accept(request, run)
        if task is not None:
            self._executor.submit(task)

    def _accept_on_object(
        self, request: Request, target: RRefId, run: Callable[[Value], None], *, quick: bool = False
    ) -> Task | None:
        """Run a request once the object that it uses is there. The object is kept until it has run.

        Args:
            quick: whether it calls no method of the object, so that the thread that creates the object may
            run it.

        Returns:
            The task to run now, if the object is there.
        """
        value = self._references.find(target)
        if value is not None:
            if value.turns is not None and not quick:
                self._accept_in_turn(request, value.turns, lambda _: run(value))
                return None
            if value.is_ready or not self._accept_when_made(request, value, run, quick):
                return self._requests.accept(request, lambda _: run(value))
            return None
        ref = self._references.expect(target)

        def run_and_release(_: Request) -> None:
            try:
                run(self._references.value(target))
            finally:
                self._references.release(ref)

        def known() -> None:
            value = self._references.value(target)
            if value.turns is not None and not quick:
                self._accept_in_turn(request, value.turns, run_and_release)
            elif value.when_ready(accept):
                accept()

        def accept() -> None:
            self._accept_later(request, run_and_release)

        if self._references.when_settled(ref, known):
            known()
        return None

    def _accept_in_turn(self, request: Request, turns: Turns, run: Callable[[Request], None]) -> None:
        """Run a request when it is its turn; the turn ends when the request is answered."""
        self._requests.count()
        self._activity.postponed.begin()

        def start() -> None:
            try:
                self._accept_later(request, run)
            finally:
                self._activity.postponed_ended()

        turns.enter(start)

    def _accept_when_made(
        self, request: Request, value: Value, run: Callable[[Value], None], quick: bool
    ) -> bool:
        """Run a request as soon as the object is there; returns false if it has just been created."""
        self._requests.count()
        self._activity.postponed.begin()

        def made() -> None:
            try:
                if quick:
                    run(value)
                else:
                    self._accept_later(request, lambda _: run(value))
            finally:
                self._activity.postponed_ended()

        if value.when_ready(made):
            self._activity.postponed_ended()
            return False
        return True

    def _run(self, request: Request, on: Value | None, answer: Answer) -> None:
        """Run a request, and call ``answer`` with the outcome, at once or on some thread later."""
        try:
            function, args, kwargs = self._load(request, on)
            content = self._requests.start(function, args, kwargs, request, answer)
        except BaseException as error:
            answer(None, error)
        else:
            del function, args, kwargs
            request.frame.buffers.clear()  # before the caller continues, as it may use that memory
            if content is not LATER:
                answer(content, None)

    def _load(self, request: Request, on: Value | None) -> Call:
        """Return what a request calls: a function, or a method of the object that it uses."""
        content = None if on is None else on.get()  # first: a call of an object that failed is not read
        function, args, kwargs = self._requests.load(request)
        if on is not None:
            name = request.frame.header.get("method")
            if function is not method_of_object or not isinstance(name, str):
                raise ProtocolError(f"asked to call {function!r}, as {name!r}, of an object")
            if self._serializer.allow is not None:
                self._serializer.allow.check_method(content, name)
            function = getattr(content, name)
            if not callable(function):
                found = with_article(type(function))
                raise TypeError(
                    f"'{name}' of this {type(content).__name__} is no method, but {found}: a reference calls "
                    f"methods, so define one that returns it, or fetch the object by to_here()"
                )
        return function, args, kwargs

    def _run_creation(self, request: Request, rref: RRefId, value: Value, on: Value | None) -> None:
        peer, frame = request.peer, request.frame
        if on is not None and self._waiting.pop(request, None) is None:  # it failed: its creator is gone
            if on.turns is not None:
                on.turns.leave()
            return
        name = frame.header.get("name") if frame.header else None

        def answer(content: Any, error: BaseException | None) -> None:
            made = None
            if error is None:
                try:
                    made = self._requests.border.work_on_object()
                except BaseException as raised:
                    error = raised
            parked = value.set(content, made) if error is None else value.fail(error)
            if on is not None and on.turns is not None:
                on.turns.leave()
            if error is not None and isinstance(name, str):
                self._names.remove(name, rref)
            self._references.finished(rref)
            if error is not None:
                self._answers.fail(peer, frame.call_id, error)
            elif peer.is_self or isinstance(request.recording, Observation):
                observed = request.recording if isinstance(request.recording, Observation) else None
                self._answers.reply(peer, frame.call_id, None, None, observed)  # no value, and so no tensors
            else:
                self._delayed.add(peer, frame.call_id)
            del content
            self._answer_parked(parked, value)

        if name is not None:
            try:
                self._names.claim(check_object_name(name), rref)
            except Exception as error:
                answer(None, error)
                return
        self._run(request, on, answer)

    def _answer_parked(self, parked: list[Fetch], value: Value) -> None:
        for peer, call_id in parked:
            try:
                self._answer_fetch((peer, call_id, value))
            except Exception:  # which must not keep the others from being answered
                logger.exception("sending an object to worker '%s' failed", peer.name)
            finally:
                self._activity.postponed_ended()

    def _answer_fetch(self, fetch: tuple[Peer, int, Value]) -> None:
        def failed(peer: Peer, call_id: int, _: Value, error: BaseException) -> None:
            self._answers.fail(peer, call_id, error)

        self._requests.border.answering(self._send_object, failed)(*fetch)

    def _send_object(self, peer: Peer, call_id: int, value: Value) -> None:
        try:
            payload = peer.codec.dumps(value.get(), peer, what="the object")
        except BaseException as error:
            self._answers.fail(peer, call_id, error)
            return
        if (
            payload.header
            or payload.staging is not None
            or len(payload.buffers) > 1
            or len(payload.buffers[0]) > SMALL_BYTES
        ):
            self._delayed.send(peer)
            self._answers.answer(peer, Kind.REPLY, call_id, payload)
        else:
            self._delayed.answer_fetch(peer, call_id, payload, value.creation, INFINITE)

    def _fetch_arrived(self, peer: Peer, frame: Frame) -> Task | None:
        target = fetched_id(frame)
        value = None if frame.header else self._references.find(target)
        if value is None:
            return self._special_fetch_arrived(peer, frame, target)
        self._requests.count()
        call_id = frame.call_id
        if not value.is_ready:
            self._activity.postponed.begin()
            if value.park((peer, call_id)):
                return None
            self._activity.postponed_ended()
        # If it is only a few bytes, this thread sends a copy, since that involves no user code.
        payload = peer.codec.dump_quickly(value.content) if value.error is None else None
        if payload is None:
            return self._answer_fetch, (peer, call_id, value)
        self._delayed.answer_fetch(peer, call_id, payload, value.creation, 0)
        return None

    def _special_fetch_arrived(self, peer: Peer, frame: Frame, target: RRefId) -> Task | None:
        """Handle a fetch of an object that is not known (yet, or any more), or one with a header."""

        def run(value: Value) -> None:
            try:
                recording = self._recording_of(frame.header, peer)
                content = value.get()
            except BaseException as error:
                self._answers.fail(peer, frame.call_id, error)
                return
            if "type" in frame.header:
                content = type(content)
            self._answers.reply(peer, frame.call_id, content, "the object", recording)

        return self._accept_on_object(Request(peer, frame), target, run, quick=True)

    def _invocation_arrived(self, peer: Peer, frame: Frame) -> Task | None:
        request = self._requests.enter(peer, frame)

        def run(value: Value) -> None:
            if value.turns is not None:
                self._run_in_turn(request, value, value.turns)
            else:
                self._requests.run(request, lambda request: self._load(request, value))

        return self._accept_on_object(request, _target(frame), run)

    def _run_in_turn(self, request: Request, value: Value, turns: Turns) -> None:
        """Like ``ReceivedRequests.run``; the next request may start once this one is answered."""
        reply = self._answers.replier(request)

        def answer(content: Any, error: BaseException | None) -> None:
            try:
                reply(content, error)
            finally:
                turns.leave()

        self._run(request, value, answer)


def _target(frame: Frame) -> RRefId:
    target = object_id(frame.header)
    if target is None:
        raise ProtocolError("a request does not say which object it is for")
    return target

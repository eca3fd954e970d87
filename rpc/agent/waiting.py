"""Finds out what a call without an answer waits for, and logs it: the shell around ``slow_calls``.

A timer on the loop checks the table of calls. A call that is due is asked about: a control message with its
id goes to its callee, whose loop answers from the frames of its threads, without its executor and without
user code. If the callee itself waits for a call, the callee of that one is asked next, and so on along the
chain. Nothing is done when a call is made; the waiting thread and its line are found when a report is due.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Final

from rpc.agent.call_frames import awaited_call, awaited_in, request_of
from rpc.agent.calls import CallTable, PendingCall, name_of
from rpc.agent.received_requests import ReceivedRequests, Request
from rpc.agent.slow_calls import (
    MAX_HOPS,
    Answer,
    AwaitedCall,
    Due,
    Hop,
    Schedule,
    chain_in_words,
    read_answer,
    write_answer,
)
from rpc.errors import ProtocolError
from rpc.group.control import Control
from rpc.group.handshake import legible
from rpc.group.peer import Peer, PeerTable
from rpc.runtime.executor import Executor
from rpc.runtime.process_signs import ProcessSigns, computes, process_signs, thread_seconds
from rpc.runtime.stacks import (
    collection_paused,
    coroutine_frames,
    frames_of_others,
    is_users,
    place_of,
    users_frame,
    variables_of,
    waits_for,
    waits_in,
)

__all__ = ["WAITING", "Waiting"]

logger = logging.getLogger(__name__)

WAITING: Final = "waiting"
"""Topic of control messages: questions about a call's state, and the answers."""

_LOOK_SECONDS: Final = 0.25
"""Interval in seconds at which the table of calls is checked."""

_IDLE_LOOK_SECONDS: Final = 0.5
"""Interval in seconds if there are no calls."""

_MAX_LOOK_SECONDS: Final = 2.5
_CALLS_PER_SECOND: Final = 4000
"""In a long table, number of calls checked per second, within the maximum interval."""

_ANSWER_SECONDS: Final = 2.0
"""How long a worker may take to answer a question, in seconds."""

_SAMPLE_SECONDS: Final = 0.1
_LEAST_COMPUTED: Final = 0.002
"""A thread computes if it has used this much CPU time within the sample, in seconds."""

_CONFIRM_SECONDS: Final = 1.0
"""Time in seconds after which a callee is asked again before the report: a thread that has computed since
makes progress, although it may have waited at both moments.
"""

_LATELY: Final = "has computed lately, and "
_PROGRESS: Final = ("computes", _LATELY)
"""Beginnings of the texts for threads that make progress."""

_MAX_REPORTS: Final = 8
"""Maximum number of calls that are asked about after one look."""

_MAX_QUESTIONS: Final = 64
"""Maximum number of questions that are being answered at a time; others are dropped."""


@dataclass(slots=True)
class _Inquiry:
    """A call that is being asked about, and what has been found so far.

    Attributes:
        waiter: the name of the waiting thread, and its line; None if no thread was found.
        seen: the calls of the chain: the incarnation of the caller, and the id.
        peer, signs, timer: the worker that is being asked now, the state of its process, and the timeout's
        timer.
        is_second: whether the call is asked about again, to see whether it has made progress.
    """

    call: PendingCall
    due: Due
    waiter: tuple[str, str] | None
    seen: set[tuple[int, int]] = field(default_factory=set)
    hops: list[Hop] = field(default_factory=list)
    peer: Peer | None = None
    signs: ProcessSigns | None = None
    timer: asyncio.TimerHandle | None = None
    is_second: bool = False


class Waiting:
    """Asks other workers what calls wait for, and answers such questions; on the loop's thread.

    Args:
        bound: age of a call at its first report, in seconds; 0 to ask about none.
    """

    def __init__(
        self,
        calls: CallTable,
        requests: ReceivedRequests,
        control: Control,
        peers: PeerTable,
        executor: Executor,
        loop: asyncio.AbstractEventLoop,
        bound: float,
    ) -> None:
        self._calls = calls
        self._requests = requests
        self._control = control
        self._peers = peers
        self._executor = executor
        self._loop = loop
        self._bound = bound
        self._schedule = Schedule(bound)
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Inquiry] = {}
        self._again: dict[int, asyncio.TimerHandle] = {}
        self._at_question: dict[tuple[int, int], tuple[int, float]] = {}
        self._answering = 0
        self._timer: asyncio.TimerHandle | None = None
        control.uncounted.add(WAITING)
        control.on(WAITING, self._received)

    def begin(self) -> None:
        """Start checking the table of calls."""
        if self._bound:
            count = len(self._calls)
            interval = min(_LOOK_SECONDS if count else _IDLE_LOOK_SECONDS, self._bound / 4)
            interval = max(interval, min(_MAX_LOOK_SECONDS, count / _CALLS_PER_SECOND))
            self._timer = self._loop.call_later(interval, self._look, interval)

    def stop(self) -> None:
        """Stop checking."""
        asked = (inquiry.timer for inquiry in self._asked.values())
        for timer in (self._timer, *self._again.values(), *asked):
            if timer is not None:
                timer.cancel()
        self._asked.clear()
        self._again.clear()

    # ---- asking

    def _look(self, interval: float) -> None:
        self.begin()
        calls = self._calls
        due = self._schedule.look(self._loop.time(), calls.waiting() if len(calls) else (), interval)
        if not due:
            return
        waiters = _waiters()
        for each in due[:_MAX_REPORTS]:
            call = calls.find(each.call_id)
            if call is not None and call.peer.lost is None:
                me = self._peers.own
                inquiry = _Inquiry(call, each, waiters.get(id(call)))
                self._ask(inquiry, call.peer, me, call.call_id)
        more = sum(each.report for each in due[_MAX_REPORTS:])
        if more:
            logger.warning("%s: %d more calls have no answer yet", legible(self._peers.own.name), more)

    def _ask(self, inquiry: _Inquiry, peer: Peer, caller: Peer, call_id: int) -> None:
        """Ask a worker about its state of a call made by ``caller``."""
        inquiry.seen.add((caller.incarnation, call_id))
        inquiry.peer, inquiry.signs = peer, _signs_of(peer)
        number = next(self._numbers)
        self._asked[number] = inquiry
        inquiry.timer = self._loop.call_later(_ANSWER_SECONDS, self._silent, number)
        self._control.post(peer, WAITING, ["ask", number, caller.incarnation, call_id])

    def _silent(self, number: int) -> None:
        inquiry = self._asked.pop(number)
        peer = inquiry.peer
        assert peer is not None
        self._finish(inquiry, Hop(legible(peer.name), _silence(peer, inquiry.signs)))

    def _told(self, peer: Peer, number: int, message: object) -> None:
        inquiry = self._asked.get(number)
        if inquiry is None:
            return  # it is late
        if inquiry.peer is not peer:
            raise ProtocolError("an answer to a question that another worker was asked")
        answer = read_answer(message)
        del self._asked[number]
        if inquiry.timer is not None:
            inquiry.timer.cancel()
        awaits = answer.awaits
        following = None if awaits is None else self._peers.by_incarnation(awaits.incarnation)
        named = "another worker" if following is None else legible(following.name)
        hop = Hop(legible(peer.name), answer, named)
        if awaits is None or following is None or following.lost is not None:
            self._finish(inquiry, hop)
        elif (peer.incarnation, awaits.call_id) in inquiry.seen:
            self._finish(inquiry, hop, closed=True)
        elif len(inquiry.hops) + 1 >= MAX_HOPS:
            self._finish(inquiry, hop)
        else:
            inquiry.hops.append(hop)
            self._ask(inquiry, following, peer, awaits.call_id)

    def _finish(self, inquiry: _Inquiry, last: Hop, *, closed: bool = False) -> None:
        """Log the findings, and keep them for the error of a timeout."""
        call, due = inquiry.call, inquiry.due
        if self._calls.find(call.call_id) is not call:
            return  # it has ended in the meantime
        me = legible(self._peers.own.name)
        found = chain_in_words(me, [*inquiry.hops, last], closed=closed)
        call.last_seen = f"After {due.age:.3g} s, {found}"
        if not due.report:
            return
        answers = [hop.answer for hop in (*inquiry.hops, last) if isinstance(hop.answer, Answer)]
        has_progress = not closed and any(each.doing.startswith(_PROGRESS) for each in answers)
        may_have = not closed and isinstance(last.answer, Answer)
        if may_have and not has_progress and not inquiry.is_second:
            seconds = min(_CONFIRM_SECONDS, self._bound)
            again = replace(due, age=due.age + seconds)
            self._again[call.call_id] = self._loop.call_later(seconds, self._ask_again, call, again)
            return
        level = logging.INFO if has_progress else logging.WARNING
        asked = f"{legible(call.peer.name)}: {legible(call.asked)}"
        if inquiry.waiter is None:
            text = "%s has had no answer for %.3g s from %s; %s; `farcall why` says more"
            logger.log(level, text, me, due.age, asked, found)
        else:
            thread, place = inquiry.waiter
            text = "%s: %s has waited %.3g s for %s (%s); %s; `farcall why` says more"
            logger.log(level, text, me, legible(thread), due.age, asked, legible(place), found)

    def _ask_again(self, call: PendingCall, due: Due) -> None:
        self._again.pop(call.call_id, None)
        if self._calls.find(call.call_id) is call and call.peer.lost is None:
            inquiry = _Inquiry(call, due, _waiters().get(id(call)), is_second=True)
            self._ask(inquiry, call.peer, self._peers.own, call.call_id)

    # ---- answering

    def _received(self, peer: Peer, body: object) -> None:
        match body:
            case ["ask", int(number), int(caller), int(call_id)]:
                self._asked_about(peer, int(number), int(caller), int(call_id))
            case ["tell", int(number), message]:
                self._told(peer, int(number), message)
            case _:
                raise ProtocolError("a malformed question what a call waits for")

    def _asked_about(self, peer: Peer, number: int, caller: int, call_id: int) -> None:
        if self._answering >= _MAX_QUESTIONS:
            return
        source = self._peers.by_incarnation(caller)

        def find() -> Request | None:
            return None if source is None else self._requests.find(source, call_id)

        request = find()
        if request is None:
            self._tell(peer, number, Answer("unknown"))
            return
        self._answering += 1
        before = _computed(request)
        earlier = self._at_question.pop((caller, call_id), None)
        if before is not None:
            self._at_question[caller, call_id] = before
            if len(self._at_question) > _MAX_QUESTIONS:
                del self._at_question[next(iter(self._at_question))]
        has_computed = _has_computed(earlier, before)

        def answer() -> None:
            self._answering -= 1
            request = find()
            found = Answer("unknown") if request is None else _describe(request, self._executor, before)
            if has_computed and not found.doing.startswith(_PROGRESS):
                found = replace(found, doing=f"{_LATELY}{found.doing}")
            self._tell(peer, number, found)

        self._loop.call_later(_SAMPLE_SECONDS, answer)

    def _tell(self, peer: Peer, number: int, answer: Answer) -> None:
        self._control.post(peer, WAITING, ["tell", number, write_answer(answer)])


def _signs_of(peer: Peer) -> ProcessSigns | None:
    return process_signs(peer.link.process) if peer.link.process else None


def _silence(peer: Peer, before: ProcessSigns | None) -> str:
    """Describe why a worker may not answer a question."""
    process = peer.link.process
    if not peer.is_self and not peer.connected:
        return "cannot be asked: the connection to it is not open"
    if not process:
        return "does not answer: it may be stopped, or something there holds the interpreter"
    now = _signs_of(peer)
    if now is None or (before is not None and before.start != now.start):
        return f"does not answer: its process ({process}) has ended, or cannot be seen"
    if now.stopped:
        return f"does not answer: its process ({process}) is stopped"
    if computes(before, now):
        return f"does not answer: its process ({process}) computes, and something there holds the interpreter"
    return f"does not answer: its process ({process}) sleeps, and something there holds the interpreter"


# ---- what frames show


def _thread(ident: int) -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if thread.ident == ident), None)


def _waiters() -> dict[int, tuple[str, str]]:
    """Return the threads that wait for calls, and their lines of user code, by the ``id`` of the call."""
    found: dict[int, tuple[str, str]] = {}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with collection_paused():
        for ident, frame in frames_of_others().items():
            call = awaited_call(frame)
            if call is not None:
                users = users_frame(frame)
                place = "no line of the program" if users is None else place_of(users)
                found[id(call)] = names.get(ident, f"thread {ident}"), place
    return found


def _run_frame(request: Request) -> tuple[int, FrameType, FrameType] | None:
    """Return the thread that runs a request, its innermost frame, and the frame that started the request.

    Called within ``collection_paused``.
    """
    for ident, innermost in frames_of_others().items():
        found = request_of(innermost)
        if found is not None and found[0] is request:
            return ident, innermost, found[1]
    return None


def _computed(request: Request) -> tuple[int, float] | None:
    """Return the thread that runs a request, and its CPU time so far."""
    with collection_paused():
        found = _run_frame(request)
    thread = None if found is None else _thread(found[0])
    if thread is None or thread.native_id is None:
        return None
    seconds = thread_seconds(thread.native_id)
    return None if seconds is None else (thread.native_id, seconds)


def _has_computed(earlier: tuple[int, float] | None, now: tuple[int, float] | None) -> bool:
    """Whether a thread has computed between two results of ``_computed``."""
    if earlier is None or now is None or earlier[0] != now[0]:
        return False
    return now[1] - earlier[1] > _LEAST_COMPUTED


def _describe(request: Request, executor: Executor, before: tuple[int, float] | None) -> Answer:
    """Describe the state of a request; ``before`` is an earlier result of ``_computed``."""
    now = _computed(request)
    with collection_paused():
        found = _run_frame(request)
        if found is not None:
            return _running(*found, computing=_has_computed(before, now))
    task = request.task
    if task is not None and not task.done():
        return _awaiting(coroutine_frames(task.get_coro()))
    ahead = executor.queued_before(request)
    if ahead is not None:
        return Answer("queued", ahead=ahead)
    return Answer("arriving" if request.arrivals is not None else "postponed")


def _running(ident: int, innermost: FrameType, run: FrameType, *, computing: bool) -> Answer:
    thread = _thread(ident)
    users = users_frame(innermost, run)
    awaits = _awaited(awaited_call(innermost))
    if users is not None:
        function, place = users.f_code.co_qualname, place_of(users)
        doing = "computes" if computing else waits_for(innermost, run)
    else:
        what = variables_of(run).get("function")
        function, place = "" if what is None else name_of(what), ""
        doing = "computes" if computing else waits_in(function.rpartition(".")[2])
    return Answer("running", "a thread" if thread is None else thread.name, function, place, doing, 0, awaits)


def _awaiting(frames: list[FrameType]) -> Answer:
    inner = [frame for frame in frames if is_users(frame.f_code.co_filename)]
    if not inner:
        return Answer("awaiting", doing="has not begun")
    users = inner[-1]
    following = frames[frames.index(users) + 1 :]
    awaits = None
    if following:
        awaits = _awaited(awaited_in(following[-1]))
    doing = f"awaits {following[0].f_code.co_qualname}" if following else "awaits a future"
    return Answer("awaiting", "", users.f_code.co_qualname, place_of(users), doing, 0, awaits)


def _awaited(call: PendingCall | None) -> AwaitedCall | None:
    return None if call is None else AwaitedCall(call.peer.incarnation, call.call_id, call.asked)

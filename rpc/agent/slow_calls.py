"""Calls without an answer for long: which to ask about and when, and the texts for the findings.

Pure: no clock, no threads, no messages; ``waiting`` is the shell around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rpc.errors import ProtocolError
from rpc.group.handshake import legible

__all__ = [
    "MAX_HOPS",
    "Answer",
    "AwaitedCall",
    "Due",
    "Hop",
    "Schedule",
    "chain_in_words",
    "hop_in_words",
    "read_answer",
    "shortened",
    "write_answer",
]

MAX_HOPS: Final = 16
"""Maximum number of workers that one chain of calls is followed through."""

_MAX_TEXT: Final = 200
"""Maximum length of a text in an answer, in characters."""

_FIRST_SHARE: Final = 0.8
_LAST_SECONDS: Final = 0.5
"""A call with a timeout is asked about after this share of the timeout, and this long before its end at the
latest, in seconds."""

_SHORTEST_TIMEOUT: Final = 1.0
"""Shortest timeout of calls that are asked about before it ends, in seconds."""

STATES: Final = frozenset(("queued", "arriving", "running", "awaiting", "postponed", "unknown"))


class Aged(Protocol):
    """The interface of a call to the schedule."""

    @property
    def call_id(self) -> int: ...
    @property
    def timeout(self) -> float: ...
    @property
    def deadline(self) -> float: ...
    @property
    def keeps_place(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Due:
    """A call to ask about now.

    Attributes:
        age: seconds since the call was made, to within one look.
        report: whether to log the findings; otherwise they are only for the error of the timeout.
    """

    call_id: int
    age: float
    report: bool


@dataclass(slots=True)
class _Entry:
    began: float
    report_at: float
    interval: float
    ask_at: float


class Schedule:
    """Decides when to ask about which call. A call is not timed when it is made: one without a timeout is
    considered to have begun when it was first seen by ``look``.

    Args:
        bound: age of a call at its first report, in seconds; the following intervals double.
    """

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self._entries: dict[int, _Entry] = {}

    def look(self, now: float, calls: Iterable[Aged], slack: float) -> list[Due]:
        """Return the calls to ask about, of all that are under way.

        Args:
            slack: time in seconds until the next look.
        """
        before, self._entries = self._entries, {}
        due: list[Due] = []
        for call in calls:
            if call.keeps_place:
                continue  # no thread waits for it: a call that waits for its object is under way too
            entry = before.get(call.call_id) or self._enter(now, call)
            self._entries[call.call_id] = entry
            report = now >= entry.report_at
            if report:
                entry.interval *= 2
                entry.report_at = now + entry.interval
            ask = now + slack > entry.ask_at
            if ask:
                entry.ask_at = float("inf")
            if report or ask:
                due.append(Due(call.call_id, now - entry.began, report))
        return due

    def _enter(self, now: float, call: Aged) -> _Entry:
        began, ask_at = now, float("inf")
        if call.timeout:
            began = call.deadline - call.timeout
            if call.timeout >= _SHORTEST_TIMEOUT:
                ask_at = began + min(call.timeout * _FIRST_SHARE, call.timeout - _LAST_SECONDS)
        return _Entry(began, began + self._bound, self._bound, ask_at)


# ---- the answers of callees


@dataclass(frozen=True, slots=True)
class AwaitedCall:
    """The call that a callee itself waits for: the incarnation of its callee, its id, and what was asked."""

    incarnation: int
    call_id: int
    asked: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A callee's state of one call.

    Attributes:
        state: one of ``STATES``.
        thread: name of the thread that runs the call.
        function: innermost function of the user's code.
        place: position in it, ``FILE:LINE``.
        doing: what it waits for, or that it computes, as text.
        ahead: number of tasks that are queued before it.
        awaits: the call that it waits for.
    """

    state: str
    thread: str = ""
    function: str = ""
    place: str = ""
    doing: str = ""
    ahead: int = 0
    awaits: AwaitedCall | None = None


def shortened(text: str) -> str:
    """Cut a text to the maximum length in an answer, keeping the end, which is more specific."""
    return text if len(text) <= _MAX_TEXT else "..." + text[3 - _MAX_TEXT :]


def write_answer(answer: Answer) -> list[Any]:
    """Encode an answer as a message for msgpack."""
    texts = (answer.thread, answer.function, answer.place, answer.doing)
    awaits = answer.awaits
    waits = None if awaits is None else [awaits.incarnation, awaits.call_id, shortened(awaits.asked)]
    return [answer.state, *map(shortened, texts), answer.ahead, waits]


def read_answer(message: object) -> Answer:
    """Decode the answer in a message of a peer, and make its texts fit for a log line."""
    match message:
        case [str(state), str(thread), str(function), str(place), str(doing), int(ahead), awaits] if (
            state in STATES and 0 <= ahead < 1 << 63
        ):
            if max(map(len, (thread, function, place, doing))) <= _MAX_TEXT:
                return Answer(
                    state,
                    legible(thread),
                    legible(function),
                    legible(place),
                    legible(doing),
                    int(ahead),
                    _read_awaited(awaits),
                )
    raise ProtocolError("a malformed answer to the question what a call waits for")


def _read_awaited(message: object) -> AwaitedCall | None:
    match message:
        case None:
            return None
        case [int(incarnation), int(call_id), str(asked)] if (
            0 <= incarnation < 1 << 63 and 0 <= call_id < 1 << 63 and len(asked) <= _MAX_TEXT
        ):
            return AwaitedCall(incarnation, call_id, legible(asked))
    raise ProtocolError("a malformed answer to the question what a call waits for")


# ---- texts


@dataclass(frozen=True, slots=True)
class Hop:
    """One worker in a chain of calls: its name, and its answer, or why there is none.

    ``awaited`` is the name of the worker that the answer's call went to.
    """

    worker: str
    answer: Answer | str
    awaited: str = ""


def hop_in_words(hop: Hop) -> str:
    """Describe one worker's state of a call."""
    answer = hop.answer
    if isinstance(answer, str):
        return f"{hop.worker} {answer}"
    at = f" at {answer.place}" if answer.place else ""
    within = f" in {answer.function}" if answer.function else ""
    match answer.state:
        case "queued":
            tasks = "1 task" if answer.ahead == 1 else f"{answer.ahead} tasks"
            text = f"has it queued behind {tasks}: all of its threads are busy"
        case "arriving":
            text = "waits for its arguments, which are still arriving"
        case "running":
            text = f"runs it on {answer.thread}{at}{within}"
        case "awaiting":
            text = f"runs it as a coroutine{at}{within}"
        case "postponed":
            text = "has run it, and waits for the future that it returned"
        case _:
            text = "runs no such call: it has not arrived, its answer is under way, or it waits for an object"
    if answer.awaits is not None:
        text += f", which waits for {hop.awaited}: {answer.awaits.asked}"
    elif answer.doing:
        text += f", which {answer.doing}"
    return f"{hop.worker} {text}"


def chain_in_words(me: str, hops: Sequence[Hop], *, closed: bool) -> str:
    """Describe the states of all workers in a chain of calls. ``closed``: the last one waits for a call of
    the chain.
    """
    text = "; ".join(map(hop_in_words, hops))
    path = [me, *(hop.worker for hop in hops)]
    if closed:
        path.append(hops[-1].awaited)
        return f"{text}; this is a cycle of calls: {' → '.join(path)}"
    end, last = path[-1], hops[-1].answer
    # A call that its callee does not know has just ended, most likely: nothing waits there.
    is_known = not (isinstance(last, Answer) and last.state == "unknown")
    if is_known and any(each != end for each in path[path.index(end) :]):
        text += f"; the calls lead back to {end}: {' → '.join(path)}"
    return text

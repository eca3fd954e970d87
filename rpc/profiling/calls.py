"""Profiles of calls: the duration of each call at the caller, and the operators that ran at the callee.

A call that is made while a profiler records on its thread carries the profiler's settings in its header. The
callee runs the function under PyTorch's legacy profiler, which records one thread, and adds the recorded
events to the header of its answer. Both ends collect calls in a ``Gathered``: calls that the callee makes
itself are returned with its operators, so that a profile shows a tree of calls of any depth. Coroutines share
one thread: the profiler of an ``async def`` callee is on during its turns, and the recordings of all turns
are combined.

Times are microseconds of the wall clock. A callee's clock may differ: its events are moved into the call.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from time import time_ns
from typing import Any, Final

from torch.autograd import DeviceType, profiler_legacy  # type: ignore[attr-defined]
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import FunctionEvent

from rpc.agent.tape import Observation, Recording
from rpc.runtime.stepwise import StepwiseCoroutine
from rpc.runtime.torch_internals import (
    disable_legacy_profiler,
    enable_legacy_profiler,
    is_profiler_enabled,
    parse_legacy_records,
)

__all__ = ["KEY", "REMOTE", "Gathered", "ProfiledRequest", "Settings", "Span", "gathering"]

logger = logging.getLogger(__name__)

KEY: Final = "profile"
"""Key of profiles in headers."""

REMOTE: Final = "#remote_op: "

_FIELDS: Final = (
    *("name", "thread", "start", "end", "fwd_thread", "input_shapes", "stack", "scope"),
    *("cpu_memory_usage", "is_async", "is_remote", "sequence_nr", "node_id", "flops"),
)
Settings = tuple[bool, bool, bool, bool]
"""Flags for what a profile records: shapes, memory, flops, stacks."""

Event = list[Any]
"""One event as it is sent: the values of ``_FIELDS``."""

_MOST: Final = 1 << 62
_SHAPE_DEPTH: Final = 3


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and -_MOST < value < _MOST  # type: ignore[operator]


def _is_count(value: object) -> bool:
    return type(value) is int and -_MOST < value < _MOST


def _are_shapes(value: object, depth: int = _SHAPE_DEPTH) -> bool:
    if type(value) is list and depth:
        return all(_are_shapes(each, depth - 1) for each in value)
    return _is_count(value)


_IS_RIGHT: Final[dict[str, Callable[[Any], bool]]] = {
    "name": lambda value: type(value) is str,
    "thread": _is_count,
    "start": _is_number,
    "end": _is_number,
    "fwd_thread": lambda value: value is None or _is_count(value),
    "input_shapes": lambda value: value is None or (type(value) is list and _are_shapes(value)),
    "stack": lambda value: (
        value is None or (type(value) is list and all(type(each) is str for each in value))
    ),
    "scope": _is_count,
    "cpu_memory_usage": _is_number,
    "is_async": lambda value: type(value) is bool,
    "is_remote": lambda value: type(value) is bool,
    "sequence_nr": _is_count,
    "node_id": _is_count,
    "flops": lambda value: value is None or _is_number(value),
}
"""Checks for the values of events from other workers: PyTorch's tables do not check them."""


@dataclass(eq=False)
class Span:
    """One call, as its caller sees it. The profiler's own event of its beginning is between ``start`` and
    ``marked``.
    """

    key: str
    how: str
    callee: int
    start: float
    marked: float
    end: float | None = None
    answer: str | None = None


@dataclass(eq=False)
class Gathered:
    """The calls of one profile, or of one profiled request. From any thread."""

    settings: Settings
    """The profile's settings."""
    me: int
    spans: list[Span] = field(default_factory=list)

    def begin(self, key: str, how: str, callee: int) -> Span:
        """Record that a call begins on this thread, at this position among the thread's other events."""
        start = time_ns() / 1000
        with record_function(key):
            pass
        span = Span(key, how, callee, start, time_ns() / 1000)
        self.spans.append(span)
        return span

    def merged(self, events: Sequence[FunctionEvent], began: float) -> list[FunctionEvent]:
        """Return the events that a profiler has parsed, merged with the calls.

        Args:
            began: start of the profiler on the wall clock; times of its events are relative to it.
        """
        named: dict[str, list[FunctionEvent]] = {}
        keys = {span.key for span in self.spans}
        for event in events:
            if event.node_id == -1:
                event.node_id = self.me
            if event.name in keys:
                named.setdefault(event.name, []).append(event)
        for found in named.values():
            found.sort(key=lambda event: event.time_range.start)
        added: list[FunctionEvent] = []
        unfinished: set[int] = set()
        for span in sorted(self.spans, key=lambda span: span.start):
            places = named.get(span.key)
            if not places:
                continue  # the profiler does not record its thread
            event = places.pop(0)
            if span.end is None:
                unfinished.add(id(event))
                continue
            event.time_range.end = max(event.time_range.end, span.end - began)
            event.is_async = span.how != "sync"
            added += [_event(each) for each in self._remote(span, began)]
        merged = [event for event in events if id(event) not in unfinished] + added
        merged.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
        return merged

    def remote_events(self, span: Span, began: float) -> list[dict[str, Any]]:
        """Return the events that a call's callee has sent, by the names of fields; times are since
        ``began``.
        """
        return [dict(zip(_FIELDS, each, strict=True)) for each in self._remote(span, began)]

    def _remote(self, span: Span, began: float) -> list[Event]:
        """Return the events of a call that the callee has sent."""
        if span.answer is None or span.end is None:
            return []
        try:
            start, end, told = json.loads(span.answer)
            if not (_is_number(start) and _is_number(end) and type(told) is list):
                raise ValueError
            shift = min(max(start, span.start), max(span.start, span.end - (end - start))) - start - began
            prefix = span.key + REMOTE
            moved = []
            for each in told:
                event = dict(zip(_FIELDS, each, strict=True))
                if not all(is_right(event[name]) for name, is_right in _IS_RIGHT.items()):
                    raise ValueError
                event |= {"name": prefix + str(event["name"]), "is_remote": True}
                event["flops"] = event["flops"] or 0  # tables sum it
                event |= {"start": event["start"] + shift, "end": event["end"] + shift}
                moved.append([event[name] for name in _FIELDS])
        except (TypeError, ValueError, KeyError, RecursionError):
            logger.warning("worker %d has sent a malformed profile of %s", span.callee, span.key)
            return []
        return moved


gathering: ContextVar[Gathered | None] = ContextVar("farcall-profile", default=None)
"""Collects calls made now, in this context; None if no profiler records."""

_numbers = itertools.count(1 << 40)
"""Ids of events that PyTorch's profiler has not assigned."""


def _event(values: Event) -> FunctionEvent:
    event = dict(zip(_FIELDS, values, strict=True))
    start, end = event.pop("start"), event.pop("end")
    name = event["name"]
    made: FunctionEvent = FunctionEvent(  # type: ignore[no-untyped-call]
        id=next(_numbers),
        trace_name=name,
        start_us=start,
        end_us=end,
        device_type=DeviceType.CPU,
        is_legacy=True,
        **event,
    )
    return made


def _values(event: FunctionEvent, began: float) -> Event:
    """Convert an event for sending, with times of the wall clock."""
    times = {"start": event.time_range.start + began, "end": event.time_range.end + began}
    return [times[name] if name in times else getattr(event, name) for name in _FIELDS]


class ProfiledRequest(Observation):
    """Runs one request under the legacy profiler of its thread.

    Args:
        inner: another observation of the request.
        gathered: collects the calls that it makes.
        tells: whether the caller wants the events.
        watchers: lists that its operators are added to, as a list, when the function has ended.
    """

    def __init__(
        self,
        inner: Recording | Observation | None,
        gathered: Gathered,
        *,
        tells: bool,
        watchers: Sequence[list[list[FunctionEvent]]] = (),
    ) -> None:
        super().__init__(inner)
        self.gathered = gathered
        self.tells = tells
        self.watchers = watchers
        self.began = self.ended = 0.0
        self._records: list[Any] = []
        self._told: list[list[FunctionEvent]] = []
        self._profiles = False
        self._token: Token[Gathered | None] | None = None

    def __enter__(self) -> None:
        super().__enter__()
        self._token = gathering.set(self.gathered)
        if not self.began:
            self.began = time_ns() / 1000
        if asyncio._get_running_loop() is None:  # otherwise see ``following``
            self._record()

    def _record(self) -> None:
        """Record this thread's operators, unless a profiler of the user already does."""
        self._profiles = not is_profiler_enabled()
        if self._profiles:
            shapes, memory, flops, stack = self.gathered.settings
            profile = profiler_legacy.profile(  # type: ignore[no-untyped-call]
                record_shapes=shapes, profile_memory=memory, with_flops=flops, with_stack=stack
            )
            enable_legacy_profiler(profile.config())  # type: ignore[no-untyped-call]

    def _stop_recording(self) -> None:
        if self._profiles:
            self._profiles = False
            records = disable_legacy_profiler()
            self._records += itertools.chain.from_iterable(records)

    def following(self, coroutine: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        return StepwiseCoroutine(coroutine, self._recorded)

    def _recorded(self, advance: Callable[..., Any], *args: Any) -> Any:
        """Run one step of a coroutine, with its operators recorded."""
        self._record()
        try:
            return advance(*args)
        finally:
            self._stop_recording()

    def __exit__(self, *error: object) -> None:
        try:
            self._stop_recording()
            if not self._told:
                self._told = [[] for _ in self.watchers]
                for watcher, told in zip(self.watchers, self._told, strict=True):
                    watcher.append(told)
            for told in self._told:
                told[:] = self._events()
        finally:
            self.ended = time_ns() / 1000
            if self._token is not None:
                gathering.reset(self._token)
            super().__exit__(*error)

    def _events(self) -> list[FunctionEvent]:
        """Return the recorded events; ``began`` is set to the time that they are relative to."""
        starts = (record for record in self._records if record.name() == "__start_profile")
        start = next(starts, None)
        if start is None:
            return []
        self.began = start.start_us()
        return parse_legacy_records([self._records])  # type: ignore[no-any-return]

    def tell(self, header: dict[str, Any]) -> None:
        if not self.tells or not self.began:
            return
        events = self.gathered.merged(self._events(), self.began)
        end = max([self.ended, *(event.time_range.end + self.began for event in events)])
        header[KEY] = json.dumps([self.began, end, [_values(event, self.began) for event in events]])

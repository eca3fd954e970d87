"""Makes PyTorch's profilers show calls while an agent runs.

While this process has an agent, six functions of PyTorch's profilers are wrapped: those that begin and end a
profile, and those that make events from recordings. The wrappers decide which profile collects calls on a
thread, and merge these into the events and exported Chrome traces. The agent's events are listened to only
while a profile is open, or a profiled request runs, so that calls cost nothing otherwise. Calls that a
callee's ``then`` callback makes after its function has returned may be missing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from time import time_ns
from typing import Any, Final

import torch
from torch.autograd import profiler, profiler_legacy
from torch.autograd.profiler_util import FunctionEvent

from rpc.agent.agent import Agent
from rpc.agent.tape import Observation, Recording, Tracing
from rpc.group.peer import PeerTable
from rpc.profiling.calls import KEY, Gathered, ProfiledRequest, Settings, Span, gathering
from rpc.profiling.chrome_trace import exporting
from rpc.runtime.current import current_agent
from rpc.runtime.events import CallBegun, CallEnded, Events
from rpc.runtime.interrupts import protected
from rpc.runtime.torch_internals import find_builtin, qualified_name

__all__ = ["CallProfiler", "call_profiler", "install", "settings_of"]

EXTENSION: Final = "profiling"


class CallProfiler:
    """Gathers the calls of one agent while profilers record. From any thread.

    Args:
        events, tracing, peers: of an agent that has not joined its group yet.
    """

    def __init__(self, events: Events, tracing: Tracing, peers: PeerTable) -> None:
        self._events = events
        self._tracing = tracing
        self._peers = peers
        self._lock = threading.RLock()  # a finalizer that runs while it is held may end a call
        self._open = 0
        self._subscriptions: ExitStack | None = None
        self._spans: dict[int, Span] = {}
        self._watchers: tuple[tuple[list[list[FunctionEvent]], Settings], ...] = ()
        tracing.observe(KEY, self._requested)

    @property
    def worker_id(self) -> int:
        """This worker's id, which events have as ``node_id``."""
        return self._peers.own.member.id

    # ---- profiles of this process

    def begin(self, settings: Settings) -> Gathered:
        """Handle that a profiler with these settings begins on this thread."""
        self.listen()
        gathered = Gathered(settings, self.worker_id)
        gathering.set(gathered)
        return gathered

    def end(self) -> None:
        """Handle that a profiler has ended."""
        gathering.set(None)
        self.stop_listening()

    def listen(self) -> None:
        """Listen to the agent's calls, until ``stop_listening``."""
        with self._lock:
            self._open += 1
            if self._subscriptions is None:
                self._subscriptions = stack = ExitStack()
                stack.enter_context(self._events.listen(CallBegun, self._call_begun))
                stack.enter_context(self._events.listen(CallEnded, self._call_ended))

    def stop_listening(self) -> None:
        """End one ``listen``; calls that have begun are waited for."""
        with self._lock:
            self._open -= 1
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self._open and not self._spans and self._subscriptions is not None:
            self._subscriptions.close()
            self._subscriptions = None

    def _call_begun(self, call: CallBegun) -> None:
        gathered, header = gathering.get(), call.header
        if gathered is None or header is None:
            return
        how = call.how
        if "method" in header:
            name = str(header["method"])
        elif "type" in header and isinstance(call.asked, str):
            name, how = "_rref_typeof_on_owner", "async"
        elif isinstance(call.asked, str):
            return  # between agents
        else:
            name = _name(call.asked)
        callee = self._peers.view.resolve(call.to).id
        key = f"rpc_{how}#{name}({self._peers.own.name} -> {call.to})"
        self._spans[call.call_id] = gathered.begin(key, how, callee)
        header[KEY] = list(gathered.settings)

    def _call_ended(self, call: CallEnded) -> None:
        span = self._spans.pop(call.call_id, None)
        if span is not None:
            span.end = time_ns() / 1000  # not of ``call.seconds``: listeners to its beginning take time
            told = None if call.header is None else call.header.get(KEY)
            span.answer = told if isinstance(told, str) else None
            if not self._open:
                with self._lock:
                    self._close_if_idle()

    # ---- requests of other workers

    def _requested(self, value: Any, inner: Recording | Observation | None) -> Observation:
        shapes, memory, flops, stack = (bool(value[at]) for at in range(4))
        return _Request(self, inner, (shapes, memory, flops, stack), tells=True)

    def watch(self, events: list[list[FunctionEvent]], settings: Settings) -> None:
        """Have the operators of each request from now on added to ``events``, as one list each."""
        with self._lock:
            self._watchers = (*self._watchers, (events, settings))
            self._tracing.watch(self._watched)

    def unwatch(self, events: list[list[FunctionEvent]]) -> None:
        """End ``watch``."""
        with self._lock:
            self._watchers = tuple(each for each in self._watchers if each[0] is not events)
            if not self._watchers:
                self._tracing.watch(None)

    def _watched(self, recording: Recording | Observation | None) -> Observation:
        watchers = self._watchers
        if isinstance(recording, ProfiledRequest):
            recording.watchers = [events for events, _ in watchers]
            return recording
        assert not isinstance(recording, Observation)
        settings = (
            any(wanted[0] for _, wanted in watchers),
            any(wanted[1] for _, wanted in watchers),
            any(wanted[2] for _, wanted in watchers),
            any(wanted[3] for _, wanted in watchers),
        )
        observed = _Request(self, recording, settings, tells=False)
        observed.watchers = [events for events, _ in watchers]
        return observed


class _Request(ProfiledRequest):
    """A profiled request: while its function runs, calls are listened to."""

    def __init__(
        self,
        calls: CallProfiler,
        inner: Recording | Observation | None,
        settings: Settings,
        *,
        tells: bool,
    ) -> None:
        super().__init__(inner, Gathered(settings, calls.worker_id), tells=tells)
        self._calls = calls

    def __enter__(self) -> None:
        self._calls.listen()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._calls.stop_listening()


def _name(function: Any) -> str:
    """Return a function's name in a PyTorch profile: for an operator its own name."""
    if isinstance(function, torch.jit.ScriptFunction):
        return str(qualified_name(function))
    builtin = find_builtin(function)
    named = builtin or getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(named)


_places: Final[list[tuple[Any, str, Any]]] = []
"""The objects of PyTorch that are replaced."""
_current: list[CallProfiler] = []


def call_profiler() -> CallProfiler:
    """Return the profiler of the current agent."""
    found: CallProfiler = current_agent().extensions[EXTENSION]
    return found


def settings_of(profile: Any) -> Settings:
    """Return what one of PyTorch's profiles records."""
    return (
        bool(profile.record_shapes),
        bool(profile.profile_memory),
        bool(profile.with_flops),
        bool(profile.with_stack),
    )


def _put(where: Any, name: str, make: Callable[[Any], Any]) -> None:
    theirs = getattr(where, name, None)
    if theirs is None:
        return  # this version of PyTorch does not have it, as the log says
    _places.append((where, name, theirs))
    setattr(where, name, functools.wraps(theirs)(make(theirs)))


def _start(theirs: Callable[[Any], None]) -> Callable[[Any], None]:
    def start(profile: Any) -> None:
        theirs(profile)
        if _current:
            gathered = _current[-1].begin(settings_of(profile))
            profile._farcall = _current[-1], gathered
            profile._farcall_open = True
            if isinstance(profile, profiler.profile):  # the legacy one's file has the calls
                export = type(profile).export_chrome_trace.__get__(profile)
                vars(profile)["export_chrome_trace"] = exporting(export, gathered)

    return start


def _exit(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def leave(profile: Any, *error: object) -> Any:
        try:
            return theirs(profile, *error)
        finally:
            found = getattr(profile, "_farcall", None)
            if found is not None and profile._farcall_open:
                profile._farcall_open = False
                found[0].end()

    return leave


def _parse_kineto(theirs: Callable[..., list[FunctionEvent]]) -> Callable[..., list[FunctionEvent]]:
    def parse(profile: Any, result: Any, *args: Any, **kwargs: Any) -> list[FunctionEvent]:
        events = theirs(profile, result, *args, **kwargs)
        found = getattr(profile, "_farcall", None)
        return events if found is None else found[1].merged(events, result.trace_start_ns() / 1000)

    return parse


def _parse_legacy(theirs: Callable[..., list[FunctionEvent]]) -> Callable[..., list[FunctionEvent]]:
    def parse(records: Any) -> list[FunctionEvent]:
        events = theirs(records)
        gathered = gathering.get()
        if gathered is None:
            return events
        began = [r.start_us() for each in records for r in each if r.name() == "__start_profile"]
        return gathered.merged(events, began[0])

    return parse


@protected
def install(agent: Agent) -> None:
    """Make profilers of this process show the calls of an agent that has not joined its group yet."""
    calls = agent.extensions[EXTENSION] = CallProfiler(agent.events, agent.tracing, agent.group.peers)
    if not _places:
        _put(profiler.profile, "_start_trace", _start)
        _put(profiler.profile, "__exit__", _exit)
        _put(profiler.profile, "_parse_kineto_results", _parse_kineto)
        _put(profiler_legacy.profile, "_start_trace", _start)
        _put(profiler_legacy.profile, "__exit__", _exit)
        _put(profiler_legacy, "_parse_legacy_records", _parse_legacy)
    _current.append(calls)

    def closed() -> None:
        _current.remove(calls)
        if not _current:
            while _places:
                setattr(*_places.pop())

    agent.lifecycle.hooks.closed.append(closed)

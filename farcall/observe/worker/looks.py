"""One look at this process: its threads, calls, requests, peers and waits, as plain values.

Only names, positions, numbers and times are recorded, and never the value of an argument. A thread that has
moved since the last look is described briefly; one that has not, with its stack and, once it has waited for a
second, what it waits for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import process_time
from types import FrameType, FunctionType, MethodType
from typing import Any, Final

from farcall.observe.format.jobs import job_id
from farcall.observe.worker.call_frames import awaited_call, awaited_in, request_of
from farcall.observe.worker.frames import (
    collection_paused,
    coroutine_frames,
    frames_of_others,
    refresh_variables,
    users_frame,
    variables_of,
    waits_for,
    waits_in,
)
from farcall.observe.worker.locks import awaited_object, holder_of, is_lock, kind_of
from rpc.agent.agent import Agent
from rpc.agent.calls import PendingCall, name_of
from rpc.agent.received_requests import Request
from rpc.group.peer import Peer
from rpc.runtime import waits
from rpc.runtime.code_folders import is_users

__all__ = ["LEAST_WAIT_SECONDS", "Looker"]

_MAX_FRAMES: Final = 24
"""Maximum number of frames of a stack."""

_MAX_ITEMS: Final = 200
"""Maximum number of calls, and of requests, that a snapshot lists: the oldest."""

_MAX_PEERS: Final = 600
_MAX_TEXT: Final = 200
_SAME_LOOKS: Final = 8
"""Number of looks after which a thread that has not moved is described again."""

LEAST_WAIT_SECONDS: Final = 1.0
"""Time in seconds for which a thread must have waited before its variables are read to find for what."""

_LEAST_SHARE: Final = 0.2
"""Share of the time since the last look for which a thread must have run, or waited for a core, to count as
computing.
"""

_LEAST_SECONDS: Final = 0.002
"""Minimum CPU time in seconds between two looks of a process in which a thread computes, and of a thread that
has run.
"""


@dataclass(slots=True)
class _Seen:
    """A thread at the last look: its position in the program, since when, the CPU time used by then, its
    description, and the number of looks that have reused it.
    """

    key: tuple[int, int]
    since: float
    seconds: float | None
    at: float
    described: dict[str, Any] | None = None
    looks: int = 0


@dataclass(slots=True)
class Looker:
    """Looks at this process. For one thread, which it does not look at.

    Attributes:
        ignored: identifiers of threads that are not described.
    """

    ignored: set[int] = field(default_factory=set)
    _threads: dict[int, _Seen] = field(default_factory=dict)
    _first: dict[tuple[int, int], float] = field(default_factory=dict)
    _used: float = 0.0

    def moved(self, now: float) -> bool:
        """Whether any thread is at another position in the program than at the last look; cheap."""
        with collection_paused():
            return self._moved(now)

    def _moved(self, now: float) -> bool:
        frames = _frames(self.ignored)
        refresh_variables(frames.values())
        before, current = self._threads, {}
        waiting = {each.thread: id(each) for each in waits.current()}
        changed = False
        for ident, frame in frames.items():
            users = users_frame(frame)
            if users is None:
                run = request_of(frame)
                key = (waiting.get(ident, 0), 0 if run is None else id(run[0]))
            else:
                key = (id(users), users.f_lasti)
            seen = before.get(ident)
            if seen is None or seen.key != key:
                seen = _Seen(key, now, None, now) if seen is None else _Seen(key, now, seen.seconds, seen.at)
                changed = True
            current[ident] = seen
        self._threads = current
        return changed or len(before) != len(current)

    def look(self, agents: Iterable[Agent], now: float, *, progress: bool = True) -> dict[str, Any]:
        """Look at everything.

        Args:
            progress: whether calls have begun or ended since the last look. If not, descriptions of threads
                that have not moved are reused, for some looks: threads may be many.
        """
        agents = list(agents)
        used = process_time()
        busy = used - self._used >= _LEAST_SECONDS
        self._used = used
        with collection_paused():
            threads = self._describe_threads(_frames(self.ignored), now, busy=busy, again=not progress)
        calls, requests = self._calls(agents, now), self._requests(agents, now)
        return {
            "threads": threads,
            "calls": calls,
            "requests": requests,
            "left_out": sum(max(0, len(agent.calls.requests) - _MAX_ITEMS) for agent in agents),
            "peers": [_peer(each) for agent in agents for each in _peers(agent)][:_MAX_PEERS],
            "executor": agents[0].executor.counts() if agents else {},
        }

    # ---- threads

    def _describe_threads(
        self, frames: Mapping[int, FrameType], now: float, *, busy: bool, again: bool
    ) -> list[dict[str, Any]]:
        by_ident = {thread.ident: thread for thread in threading.enumerate()}
        waiting: dict[int, list[dict[str, Any]]] = {}
        for each in waits.current():
            waiting.setdefault(each.thread, []).append(_wait(each))
        described: list[dict[str, Any]] = []
        for ident, frame in frames.items():
            seen = self._threads.get(ident) or _Seen((0, 0), now, None, now)
            thread = by_ident.get(ident)
            native = None if thread is None else _native_id(thread)
            share, seconds = self._ran(seen, native, now) if busy else (0.0, 0.0)
            computes, has_run = share >= _LEAST_SHARE, seconds >= _LEAST_SECONDS
            seen.looks += 1
            if again and seen.described is not None and not has_run and seen.looks % _SAME_LOOKS:
                described.append(seen.described)
                continue
            waits_long = now - seen.since >= LEAST_WAIT_SECONDS
            found = _thread(ident, frame, frames, computes=computes, waits_long=waits_long)
            found |= {
                "id": ident,
                "native": native,
                "name": f"thread {ident}" if thread is None else thread.name,
                "since": seen.since,
            }
            if has_run:
                found["ran"] = True
            if ident in waiting:
                found["waits"] = waiting[ident]
                found.pop("idle", None)
            # The first description may be of a momentary state; computing, and waits of a group, change.
            lasts = seen.looks > 1 and waits_long and not has_run and ident not in waiting
            seen.described = found if lasts else None
            described.append(found)
        return described

    def _ran(self, seen: _Seen, native: int | None, now: float) -> tuple[float, float]:
        """Return for how long a thread has run, or waited for a core, since the last look: as a share of that
        time, and in seconds.
        """
        before, at = seen.seconds, seen.at
        seen.seconds = None if native is None else _runnable_seconds(native)
        seen.at = now
        if before is None or seen.seconds is None or now - at < 0.01:
            return 0.0, 0.0
        return (seen.seconds - before) / (now - at), seen.seconds - before

    # ---- calls and requests

    def _calls(self, agents: Iterable[Agent], now: float) -> list[dict[str, Any]]:
        pending = [call for agent in agents for call in agent.calls.table.waiting()]
        first, self._first = self._first, {}
        found: list[dict[str, Any]] = []
        for call in pending[: 10 * _MAX_ITEMS]:
            key = (call.peer.incarnation, call.call_id)
            began = call.began or (call.deadline - call.timeout if call.timeout else first.get(key, now))
            self._first[key] = began
            if len(found) < _MAX_ITEMS and not call.keeps_place:
                found.append(_call(call, began))
        return found

    def _requests(self, agents: Iterable[Agent], now: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for agent in agents:
            oldest = agent.calls.requests.entered()[:_MAX_ITEMS]
            describe = getattr(agent.extensions.get("rref"), "method_in_words", None)
            for request in oldest:
                described = _request(request, agent)
                what = "" if describe is None else describe(request.frame.header)
                found.append(described | {"what": _text(what)} if what else described)
        return found


def _native_id(thread: threading.Thread) -> int | None:
    """Return the kernel's number of a thread; in a forked child, Python 3.11 has the parent's of the main
    thread.
    """
    return os.getpid() if thread is threading.main_thread() else thread.native_id


def _runnable_seconds(thread: int) -> float | None:
    """Return for how long a thread has run, or waited for a core; None if the kernel does not report it."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:
            running, waiting, _ = file.read().split()
        return (int(running) + int(waiting)) / 1e9
    except (OSError, ValueError):
        return None


def _frames(ignored: Iterable[int]) -> dict[int, FrameType]:
    """Return the innermost frames of other threads."""
    frames = frames_of_others()
    for ident in ignored:
        frames.pop(ident, None)
    return frames


def _text(text: object) -> str:
    shown = str(text)
    return shown if len(shown) <= _MAX_TEXT else shown[: _MAX_TEXT - 3] + "..."


def _call(call: PendingCall, began: float) -> dict[str, Any]:
    peer = call.peer
    found = {
        "id": call.call_id,
        "to": peer.name,
        "incarnation": peer.incarnation,
        "what": _text(call.asked),
        "began": began,
        "timeout": call.timeout,
    }
    code = getattr(call.what, "__code__", None) if isinstance(call.what, FunctionType | MethodType) else None
    if code is not None:
        found["defined"] = [code.co_qualname, code.co_filename, code.co_firstlineno]
    return found


def _request(request: Request, agent: Agent) -> dict[str, Any]:
    found: dict[str, Any] = {
        "from": request.peer.name,
        "incarnation": request.peer.incarnation,
        "id": request.frame.call_id,
        "began": request.began,
    }
    task = request.task
    if task is not None and not task.done():
        frames = coroutine_frames(task.get_coro())
        inner = [frame for frame in frames if is_users(frame.f_code.co_filename)]
        found["state"] = "awaiting"
        found["stack"] = [_place(frame) for frame in reversed(frames)][:_MAX_FRAMES]
        if inner:
            following = frames[frames.index(inner[-1]) + 1 :]
            found["doing"] = f"awaits {following[0].f_code.co_qualname}" if following else "awaits a future"
            call = awaited_in(following[-1]) if following else None
            if call is not None:
                found["call"] = [call.peer.incarnation, call.call_id]
        return found
    ahead = agent.executor.queued_before(request)
    if ahead is not None:
        return found | {"state": "queued", "ahead": ahead}
    return found | {"state": "arriving" if request.arrivals is not None else "begun"}


def _peers(agent: Agent) -> list[Peer]:
    return agent.group.peers.all()


def _peer(peer: Peer) -> dict[str, Any]:
    link = peer.link
    found: dict[str, Any] = {
        "name": peer.name,
        "id": peer.member.id,
        "incarnation": peer.incarnation,
        "connected": peer.connected,
        "state": link.state.name,
        "failures": link.failures,
        "self": peer.is_self,
        "near": peer.near,
    }
    if peer.lost is not None:
        found["lost"] = _text(peer.lost)
        found["left"] = peer.has_left
    if not peer.near:
        found["host"] = job_id(peer.member.host)
    if link.process:
        found["process"] = link.process
    return found


def _wait(each: waits.Waiting) -> dict[str, Any]:
    found: dict[str, Any] = {"what": each.what, "since": each.since, "details": dict(each.details)}
    if each.whom is not None:
        try:
            found["whom"] = [_text(name) for name in each.whom()][:64]
        except Exception as error:  # the state that it reads changes while it is read
            found["unknown"] = type(error).__name__
    return found


def _place(frame: FrameType) -> list[Any]:
    code = frame.f_code
    return [code.co_qualname, code.co_filename, frame.f_lineno or 0]


def _thread(
    ident: int, innermost: FrameType, frames: Mapping[int, FrameType], *, computes: bool, waits_long: bool
) -> dict[str, Any]:
    """Describe what one thread does."""
    run = request_of(innermost)
    users = users_frame(innermost, None if run is None else run[1])
    call = awaited_call(innermost)
    found: dict[str, Any] = {}
    if run is not None:
        request, frame = run
        found["request"] = [request.peer.incarnation, request.frame.call_id]
        function = variables_of(frame).get("function")
        if function is not None:
            found["function"] = _text(name_of(function))
    if call is not None:
        found["call"] = [call.peer.incarnation, call.call_id]
    if computes:
        found["computes"] = True
    if users is None and run is None and call is None and not computes:
        found["idle"] = True
        found["stack"] = [_place(innermost)]
        return found
    found["stack"] = _stack(innermost)
    if users is not None:
        found["at"] = _place(users)
        found["doing"] = waits_for(innermost, None if run is None else run[1])
        if waits_long and not computes and call is None:
            found |= _lock(ident, users, frames)
    elif run is not None:
        found["doing"] = waits_in(str(found.get("function", "")).rpartition(".")[2])
    return found


def _stack(innermost: FrameType) -> list[list[Any]]:
    places: list[list[Any]] = []
    frame: FrameType | None = innermost
    while frame is not None and len(places) < _MAX_FRAMES:
        places.append(_place(frame))
        frame = frame.f_back
    return places


def _lock(ident: int, users: FrameType, frames: Mapping[int, FrameType]) -> dict[str, Any]:
    """Return the name of what a blocked thread waits for, and the holder if that is a lock."""
    awaited = awaited_object(users)
    if awaited is None:
        return {}
    found: dict[str, Any] = {"on": _text(awaited.name), "kind": kind_of(awaited.object)}
    if not is_lock(awaited.object):
        return found
    holder = holder_of(awaited.object, ident, frames)
    if holder is not None:
        found["holder"] = holder.thread
        found["sure"] = holder.sure
        if holder.frame is not None:
            place = _place(holder.frame)
            place[2] = holder.line
            found["held_at"] = place
    return found

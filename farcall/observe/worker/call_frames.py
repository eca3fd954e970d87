"""Finds the calls that the threads of this process wait for, and the requests that they run, in
their frames.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType
from typing import Any, Final

from farcall.observe.worker.frames import collection_paused, frames_of_others, variables_of
from rpc.agent.calls import PendingCall, name_of
from rpc.agent.futures import Future
from rpc.agent.received_requests import ReceivedRequests, Request
from rpc.agent.waiting import as_completed
from rpc.runtime.code_folders import is_users

__all__ = ["awaited_call", "awaited_in", "request_of", "running"]

_RUNS: Final = frozenset(
    each.__code__ for each in (ReceivedRequests.run, ReceivedRequests.start, ReceivedRequests._finish)
)
"""Code that runs a request, which is its local variable ``request``."""


def _call_of(future: object) -> PendingCall | None:
    call = getattr(future, "_call", None)
    return call if isinstance(call, PendingCall) else None


_WAITS: Final[dict[CodeType, Callable[[Mapping[str, Any]], PendingCall | None]]] = {
    PendingCall.wait.__code__: lambda values: values.get("self"),
    Future.wait.__code__: lambda values: _call_of(values.get("self")),
    Future.__await__.__code__: lambda values: _call_of(values.get("self")),
    as_completed.__code__: lambda values: next(filter(None, map(_call_of, values.get("awaited", ()))), None),
}
"""Code that waits for a call, and a function that returns the call, given its local variables."""


def awaited_call(frame: FrameType | None) -> PendingCall | None:
    """Return the call that a thread waits for, given its innermost frame. Outer frames do not count: their
    code has been interrupted by a signal handler or a finalizer of the user.
    """
    while frame is not None and not is_users(frame.f_code.co_filename):
        find = _WAITS.get(frame.f_code)
        if find is not None:
            call = find(variables_of(frame))
            return call if call is not None and call.outcome is None else None
        frame = frame.f_back
    return None


def awaited_in(frame: FrameType) -> PendingCall | None:
    """Return the call that this frame itself waits for: the innermost one of a suspended coroutine."""
    find = _WAITS.get(frame.f_code)
    if find is None:
        return None
    with collection_paused():
        return find(variables_of(frame))


def request_of(frame: FrameType | None) -> tuple[Request, FrameType] | None:
    """Return the request that a thread runs, given its innermost frame, and the frame that started it."""
    while frame is not None:
        if frame.f_code in _RUNS:
            request = variables_of(frame).get("request")
            if isinstance(request, Request):
                return request, frame
        frame = frame.f_back
    return None


def running(threads: Iterable[threading.Thread]) -> list[str]:
    """Describe the functions that others of these threads run for other workers."""
    found: list[str] = []
    with collection_paused():
        frames = frames_of_others()
        for thread in threads:
            running = request_of(frames.get(thread.ident or 0))
            function = None if running is None else variables_of(running[1]).get("function")
            if running is not None and function is not None:
                found.append(f"{name_of(function)} for worker '{running[0].peer.name}'")
    return found

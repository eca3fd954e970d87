"""What runs for other workers is named by the frames of the threads that run it."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

from farcall.observe.worker.call_frames import running
from rpc.agent.received_requests import ReceivedRequests, Request
from rpc.agent.tape import Tracing
from rpc.runtime.events import Events
from rpc.wire.frames import Frame, Kind


class Kept:
    pass


def test_whoever_asks_what_runs_is_not_kept_until_garbage_is_collected() -> None:
    def ask() -> weakref.ref[Kept]:
        kept = Kept()
        assert running(threading.enumerate()) == []
        return weakref.ref(kept)

    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()


def test_what_runs_is_named_with_who_asked_for_it() -> None:
    begun, told = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        told.wait()

    peer: Any = SimpleNamespace(name="caller")
    request = Request(peer, Frame(Kind.CALL, 5, {}, [b"asked"], codec=7))
    parts: Any = (SimpleNamespace(unanswered={}), None, None, Tracing(), Events(), None, None)
    callee = ReceivedRequests(*parts)
    thread = threading.Thread(target=callee.start, args=(wait, (), {}, request))
    thread.start()
    begun.wait()
    found = running([thread])
    told.set()
    thread.join()
    assert found == [f"{wait.__qualname__} for worker 'caller'"]

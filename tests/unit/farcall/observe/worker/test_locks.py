"""The holder of the lock that a thread waits for, found in frames and code."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from farcall.observe.worker.frames import users_frame
from farcall.observe.worker.locks import awaited_object, holder_of

LOCK = threading.Lock()
RLOCK = threading.RLock()
TABLE = {"lock": threading.Lock()}


class Locked:
    __slots__ = ()
    lock: threading.Lock

    def hold(self, held: threading.Event, release: threading.Event) -> None:
        with self.lock:
            held.set()
            release.wait()

    def wait(self) -> None:
        with self.lock:
            pass


class Account(Locked):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class SlottedAccount(Locked):
    __slots__ = ("lock",)
    shared = threading.Lock()

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def hold_shared(self, held: threading.Event, release: threading.Event) -> None:
        with self.shared:
            held.set()
            release.wait()

    def wait_for_shared(self) -> None:
        with self.shared:
            pass


ACCOUNT = Account()
SLOTTED = SlottedAccount()


def hold_lock(held: threading.Event, release: threading.Event) -> None:
    with LOCK:
        held.set()
        release.wait()


def wait_for_lock() -> None:
    with LOCK:
        pass


def acquire_lock() -> None:
    LOCK.acquire()
    LOCK.release()


def hold_by_acquire(held: threading.Event, release: threading.Event) -> None:
    LOCK.acquire()
    held.set()
    release.wait()
    LOCK.release()


def hold_rlock(held: threading.Event, release: threading.Event) -> None:
    with RLOCK:
        held.set()
        release.wait()


def wait_for_rlock() -> None:
    with RLOCK:
        pass


def hold_in_table(held: threading.Event, release: threading.Event) -> None:
    with contextlib.nullcontext(), TABLE["lock"]:
        for _ in range(1):
            held.set()
            release.wait()


def wait_for_table() -> None:
    with TABLE["lock"]:
        pass


@contextlib.contextmanager
def running(*targets: tuple[Callable[..., Any], tuple[Any, ...]]) -> Iterator[list[threading.Thread]]:
    threads = [threading.Thread(target=function, args=args, daemon=True) for function, args in targets]
    for thread in threads:
        thread.start()
    yield threads


def frames() -> dict[int, FrameType]:
    found = sys._current_frames()
    del found[threading.get_ident()]
    return found


def until_waits(thread: threading.Thread, function: Callable[..., Any]) -> FrameType:
    """The thread's frame of a function, once that waits for an object."""
    while True:
        frame = users_frame(frames().get(thread.ident or 0))
        if frame is not None and frame.f_code is function.__code__ and awaited_object(frame) is not None:
            return frame


@pytest.mark.parametrize(
    ("hold", "wait", "name", "sure"),
    [
        (hold_lock, wait_for_lock, "LOCK", True),
        (hold_lock, acquire_lock, "LOCK", True),
        (hold_by_acquire, wait_for_lock, "LOCK", False),
        (hold_rlock, wait_for_rlock, "RLOCK", True),
        (hold_in_table, wait_for_table, "TABLE['lock']", True),
        (ACCOUNT.hold, ACCOUNT.wait, "self.lock", True),
        (SLOTTED.hold, SLOTTED.wait, "self.lock", True),
        (SLOTTED.hold_shared, SLOTTED.wait_for_shared, "self.shared", True),
    ],
)
def test_holder_is_found(hold: Callable[..., Any], wait: Callable[..., Any], name: str, sure: bool) -> None:
    held, release = threading.Event(), threading.Event()
    with running((hold, (held, release))) as (holder,):
        held.wait()
        with running((wait, ())) as (waiter,):
            function = getattr(wait, "__func__", wait)
            frame = until_waits(waiter, function)
            awaited = awaited_object(frame)
            assert awaited is not None
            assert awaited.name == name
            found = holder_of(awaited.object, waiter.ident or 0, frames())
            assert found is not None
            assert found.thread == holder.ident
            assert found.sure is sure
            assert found.frame is not None
            assert found.frame.f_code.co_name == hold.__name__
            del frame
            release.set()
            waiter.join()
        holder.join()


def take(items: queue.Queue[None]) -> None:
    items.get()


def test_queue_is_named() -> None:
    items = queue.Queue[None]()
    with running((take, (items,))) as (waiter,):
        awaited = awaited_object(until_waits(waiter, take))
        assert awaited is not None
        assert (awaited.object, awaited.name) == (items, "items")
        items.put(None)
        waiter.join()


class Trap:
    @property
    def lock(self) -> threading.Lock:
        raise AssertionError("code of the program has run")


def test_no_code_of_the_program_runs() -> None:
    trap, held, release = Trap(), threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait()
        with trap.lock:
            pass

    with running((hold, ())) as (thread,):
        held.wait()
        frame = frames()[thread.ident or 0]
        while frame.f_code is not hold.__code__:
            assert frame.f_back is not None
            frame = frame.f_back
        assert holder_of(LOCK, 0, frames()) is None
        del frame
        with contextlib.suppress(AssertionError):
            threading.excepthook, before = (lambda _: None), threading.excepthook
            release.set()
            thread.join()
            threading.excepthook = before

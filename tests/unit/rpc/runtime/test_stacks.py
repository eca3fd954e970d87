"""What a thread does, by its frames."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from types import FrameType

import pytest

from rpc.runtime.stacks import coroutine_frames, is_users, place_of, users_frame, waits_for

lock = threading.Lock()
event = threading.Event()
condition = threading.Condition()
semaphore = threading.Semaphore(0)
items: queue.Queue[None] = queue.Queue()
near, far = socket.socketpair()


def in_with() -> None:
    with lock:
        pass


def in_acquire() -> None:
    lock.acquire()


def in_event() -> None:
    event.wait()


def in_semaphore() -> None:
    semaphore.acquire()


def in_queue() -> None:
    items.get()


def in_condition() -> None:
    with condition:
        condition.wait()


def in_subprocess() -> None:
    subprocess.run([sys.executable, "-c", "input()"], stdin=near.fileno(), check=True)


def let_go() -> None:
    lock.release()
    event.set()
    with condition:
        condition.notify_all()
    semaphore.release()
    items.put(None)
    far.send(b"\n")


WAYS: tuple[tuple[Callable[[], object], str], ...] = (
    (in_with, "waits to enter a with block, for a lock most likely"),
    (in_acquire, "waits for a lock"),
    (in_event, "waits for an Event"),
    (in_condition, "waits for a Condition"),
    (in_semaphore, "waits for a semaphore"),
    (in_queue, "waits for a queue"),
    (lambda: near.recv(1), "waits for a socket"),
    (lambda: select.select([near], [], []), "waits for a socket or pipe"),
    (in_subprocess, "waits for a subprocess"),
    (lambda: os.read(near.fileno(), 1), "waits for a file or pipe"),
)


@contextlib.contextmanager
def waiting(function: Callable[[], object]) -> Iterator[threading.Thread]:
    lock.acquire(blocking=False)
    event.clear()
    thread = threading.Thread(target=function)
    thread.start()
    try:
        yield thread
    finally:
        let_go()
        thread.join(20)
        assert not thread.is_alive()
        near.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            near.recv(10)
        near.setblocking(True)
        with contextlib.suppress(queue.Empty):
            items.get_nowait()
        while semaphore.acquire(blocking=False):
            pass


def frame_of(thread: threading.Thread) -> FrameType:
    return sys._current_frames()[thread.ident or 0]


@pytest.mark.parametrize(("function", "words"), WAYS)
def test_what_a_thread_waits_for(function: Callable[[], object], words: str) -> None:
    with waiting(function) as thread:
        deadline = time.monotonic() + 20
        while (found := waits_for(frame_of(thread))) != words:
            assert time.monotonic() < deadline, found
        users = users_frame(frame_of(thread))
        assert users is not None
        assert users.f_code is function.__code__
        assert place_of(users).partition(":")[0].endswith("test_stacks.py")


def test_code_of_ours_and_of_python_is_not_the_users() -> None:
    assert is_users(__file__)
    assert not is_users(threading.__file__)
    assert not is_users(place_of.__code__.co_filename)
    assert not is_users("<frozen importlib._bootstrap>")


def test_frames_of_a_coroutine_lead_to_what_it_awaits() -> None:
    class Suspension:
        def __await__(self) -> Generator[None, None, None]:
            yield

    async def inner() -> None:
        await Suspension()

    async def outer() -> None:
        await inner()

    coroutine = outer()
    coroutine.send(None)
    names = [frame.f_code.co_name for frame in coroutine_frames(coroutine)]
    assert names == ["outer", "inner", "__await__"]
    coroutine.close()

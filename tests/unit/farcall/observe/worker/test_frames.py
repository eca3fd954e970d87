"""What a thread does, by its frames."""

from __future__ import annotations

import contextlib
import gc
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
from torch.distributed import rpc as torch_rpc

import rpc.api
from farcall.observe.worker.frames import (
    collection_paused,
    coroutine_frames,
    frames_of_others,
    users_frame,
    waits_for,
)
from rpc.runtime.code_folders import is_users

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


_OF_OURS: dict[str, Callable[[], object]] = {}
exec(compile("def shutdown(): event.wait()", rpc.api.__file__, "exec"), globals(), _OF_OURS)


def in_shutdown() -> None:
    _OF_OURS["shutdown"]()


_IN_PYTORCHS_RPC: dict[str, Callable[[], object]] = {}
exec(compile("def init_rpc(): event.wait()", torch_rpc.__file__, "exec"), globals(), _IN_PYTORCHS_RPC)


def in_pytorchs_rpc() -> None:
    _IN_PYTORCHS_RPC["init_rpc"]()


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
    (in_shutdown, "is in shutdown()"),
    (
        in_pytorchs_rpc,
        (
            "waits in torch.distributed.rpc, which is not farcall's: "
            "import farcall.rpc, or launch with --lend-names"
        ),
    ),
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
        assert users.f_code.co_filename == __file__


def test_code_of_ours_and_of_python_is_not_the_users() -> None:
    assert is_users(__file__)
    assert not is_users(threading.__file__)
    assert not is_users(users_frame.__code__.co_filename)
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


at_allocations = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="Python 3.12 collects garbage between instructions"
)


@at_allocations
def test_no_garbage_is_collected_while_frames_of_others_are_read() -> None:
    seen: list[str] = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    try:
        with collection_paused():
            seen.clear()
            assert threading.get_ident() not in frames_of_others()
            kept = [[each] for each in range(9000)]
            assert not seen
        kept += [[each] for each in range(3000)]
        assert seen
    finally:
        gc.callbacks.pop()


@at_allocations
def test_collection_is_as_before_after_a_pause() -> None:
    before = gc.get_threshold()
    gc.set_threshold(700, 11, 12)
    try:
        with contextlib.suppress(KeyError), collection_paused():
            with collection_paused():
                pass
            assert gc.get_threshold()[0] == 0
            gc.disable()  # by the program, meanwhile
            raise KeyError
        assert gc.get_threshold() == (700, 11, 12)
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.set_threshold(*before)


@at_allocations
def test_child_that_is_forked_during_a_pause_collects_garbage() -> None:
    before = gc.get_threshold()
    with collection_paused():
        child = os.fork()
        if not child:
            with collection_paused():
                pass
            os._exit(0 if gc.get_threshold() == before else 1)
    assert os.waitpid(child, 0)[1] == 0

"""Callees that wait, sleep or compute."""

# ruff: noqa: PLW0108  # a lambda is the innermost frame of the program

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch

from tests.support.hangs.hang import ENDS_WITH_PARENT, LONG, from_worker0, hang
from tests.support.workers import Worker

LOCK = threading.Lock()
RLOCK = threading.RLock()
CONDITION = threading.Condition()
SEMAPHORE = threading.Semaphore(0)
EVENT = threading.Event()
QUEUE = queue.Queue[None]()


def enter_lock() -> None:
    with LOCK:
        pass


def hold_in_sleep() -> None:
    held = threading.Event()

    def keep() -> None:
        with LOCK:
            held.set()
            time.sleep(LONG)  # culprit: lock_held_by_another_thread

    threading.Thread(target=keep, daemon=True, name="keeper").start()
    held.wait()
    enter_lock()


@hang("sleeps")
def lock_held_by_another_thread(worker: Worker) -> None:
    from_worker0(worker, hold_in_sleep)


def hold_rlock_in_sleep() -> None:
    held = threading.Event()

    def keep() -> None:
        RLOCK.acquire()
        held.set()
        time.sleep(LONG)  # culprit: rlock_held_by_another_thread

    threading.Thread(target=keep, daemon=True, name="keeper").start()
    held.wait()
    with RLOCK:
        pass


@hang("sleeps")
def rlock_held_by_another_thread(worker: Worker) -> None:
    from_worker0(worker, hold_rlock_in_sleep)


def forget_release() -> None:
    LOCK.acquire()


def acquire_forgotten() -> None:
    forget_release()
    LOCK.acquire()  # culprit: lock_never_released


@hang("lock")
def lock_never_released(worker: Worker) -> None:
    from_worker0(worker, acquire_forgotten)


def join_thread() -> None:
    thread = threading.Thread(target=EVENT.wait, daemon=True)
    thread.start()
    thread.join()  # culprit: thread_never_ends


def receive() -> None:
    one, _other = socket.socketpair()
    one.recv(1)  # culprit: socket_brings_nothing


def receive_in_pipe() -> None:
    one, _other = multiprocessing.Pipe()
    one.recv()  # culprit: pipe_brings_nothing


def open_fifo(path: str) -> None:
    os.mkfifo(path)
    with open(path) as file:  # culprit: file_cannot_be_opened
        file.read()


@hang("file")
def file_cannot_be_opened(worker: Worker) -> None:
    from_worker0(worker, open_fifo, str(worker.folder / "fifo"))


def await_subprocess() -> None:
    with subprocess.Popen([sys.executable, "-c", f"{ENDS_WITH_PARENT}; time.sleep(3600)"]) as process:
        process.wait()  # culprit: subprocess_does_not_end


def compute() -> None:
    while True:
        sum(range(1000))  # culprit: callee_computes


def multiply() -> None:
    matrix = torch.ones(600, 600)
    while True:
        matrix @ matrix  # culprit: callee_computes_in_pytorch


def await_condition() -> None:
    with CONDITION:
        CONDITION.wait()  # culprit: condition_is_never_notified


WAITS: dict[str, tuple[str, Callable[[], object]]] = {
    "queue_stays_empty": ("queue", lambda: QUEUE.get()),  # culprit: queue_stays_empty
    "event_is_never_set": ("event", lambda: EVENT.wait()),  # culprit: event_is_never_set
    "condition_is_never_notified": ("condition", await_condition),
    "semaphore_is_never_released": (
        "semaphore",
        lambda: SEMAPHORE.acquire(),  # culprit: semaphore_is_never_released
    ),
    "barrier_of_threads_lacks_one": (
        "thread barrier",
        lambda: threading.Barrier(2).wait(),  # culprit: barrier_of_threads_lacks_one
    ),
    "thread_never_ends": ("join", join_thread),
    "socket_brings_nothing": ("socket", receive),
    "pipe_brings_nothing": ("pipe", receive_in_pipe),
    "subprocess_does_not_end": ("subprocess", await_subprocess),
    "callee_sleeps": ("sleeps", lambda: time.sleep(LONG)),  # culprit: callee_sleeps
    "callee_computes": ("computes", compute),
    "callee_computes_in_pytorch": ("computes", multiply),
}
"""Kind and function of hangs that need nothing but a callee."""


def wait(name: str) -> None:
    WAITS[name][1]()


def add(name: str, kind: str) -> None:
    def run(worker: Worker) -> None:
        from_worker0(worker, wait, name)

    run.__name__ = name
    hang(kind)(run)


for _name, (_kind, _) in WAITS.items():
    add(_name, _kind)

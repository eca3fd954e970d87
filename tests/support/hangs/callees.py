"""Callees that wait, sleep or compute."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import subprocess
import sys
import threading
import time

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


def take() -> None:
    QUEUE.get()  # culprit: queue_stays_empty


@hang("queue")
def queue_stays_empty(worker: Worker) -> None:
    from_worker0(worker, take)


def await_event() -> None:
    EVENT.wait()  # culprit: event_is_never_set


@hang("event")
def event_is_never_set(worker: Worker) -> None:
    from_worker0(worker, await_event)


def await_condition() -> None:
    with CONDITION:
        CONDITION.wait()  # culprit: condition_is_never_notified


@hang("condition")
def condition_is_never_notified(worker: Worker) -> None:
    from_worker0(worker, await_condition)


def await_semaphore() -> None:
    SEMAPHORE.acquire()  # culprit: semaphore_is_never_released


@hang("semaphore")
def semaphore_is_never_released(worker: Worker) -> None:
    from_worker0(worker, await_semaphore)


def await_party() -> None:
    threading.Barrier(2).wait()  # culprit: barrier_of_threads_lacks_one


@hang("thread barrier")
def barrier_of_threads_lacks_one(worker: Worker) -> None:
    from_worker0(worker, await_party)


def join_thread() -> None:
    thread = threading.Thread(target=EVENT.wait, daemon=True)
    thread.start()
    thread.join()  # culprit: thread_never_ends


@hang("join")
def thread_never_ends(worker: Worker) -> None:
    from_worker0(worker, join_thread)


def receive() -> None:
    one, _other = socket.socketpair()
    one.recv(1)  # culprit: socket_brings_nothing


@hang("socket")
def socket_brings_nothing(worker: Worker) -> None:
    from_worker0(worker, receive)


def receive_in_pipe() -> None:
    one, _other = multiprocessing.Pipe()
    one.recv()  # culprit: pipe_brings_nothing


@hang("pipe")
def pipe_brings_nothing(worker: Worker) -> None:
    from_worker0(worker, receive_in_pipe)


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


@hang("subprocess")
def subprocess_does_not_end(worker: Worker) -> None:
    from_worker0(worker, await_subprocess)


def sleep() -> None:
    time.sleep(LONG)  # culprit: callee_sleeps


@hang("sleeps")
def callee_sleeps(worker: Worker) -> None:
    from_worker0(worker, sleep)


def compute() -> None:
    while True:
        sum(range(1000))  # culprit: callee_computes


@hang("computes")
def callee_computes(worker: Worker) -> None:
    from_worker0(worker, compute)


def multiply() -> None:
    matrix = torch.ones(600, 600)
    while True:
        matrix @ matrix  # culprit: callee_computes_in_pytorch


@hang("computes")
def callee_computes_in_pytorch(worker: Worker) -> None:
    from_worker0(worker, multiply)

"""Processes that are stopped, held by a debugger, or dead."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import torch

import rpc
import spmd
from tests.support.hangs.hang import ENDS_WITH_PARENT, LONG, hang, until_seen
from tests.support.workers import Worker

EVENT = threading.Event()
QUEUE = queue.Queue[None]()


def stop_myself() -> None:
    until_seen("process_is_stopped")
    os.kill(os.getpid(), signal.SIGSTOP)


@hang("stopped", dead_kinds=("dead",))
def process_is_stopped(worker: Worker) -> None:
    if worker.rank == 1:
        time.sleep(LONG)  # culprit: process_is_stopped
    rpc.rpc_sync("worker1", stop_myself, timeout=0)


def be_traced() -> None:
    """Start a debugger, which stops this process."""
    until_seen("process_is_held_by_a_debugger")
    program = (
        f"{ENDS_WITH_PARENT}\n"
        f"for thread in os.listdir('/proc/{os.getpid()}/task'):\n"
        "    ctypes.CDLL(None).ptrace(16, int(thread), 0, 0)\n"
        "time.sleep(3600)\n"
    )
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1 & (1 << 64) - 1), 0, 0, 0)
    subprocess.Popen([sys.executable, "-c", program])


@hang("traced", dead_kinds=("dead",))
def process_is_held_by_a_debugger(worker: Worker) -> None:
    if worker.rank == 1:
        time.sleep(LONG)  # culprit: process_is_held_by_a_debugger
    rpc.rpc_sync("worker1", be_traced)
    rpc.rpc_sync("worker1", await_event, timeout=0)


def die_when_seen(worker: Worker) -> None:
    until_seen("worker_is_dead")
    worker.die()


def await_event() -> None:
    EVENT.wait()


@hang("dead", size=3, dead_kinds=("dead",))
def worker_is_dead(worker: Worker) -> None:
    if worker.rank == 1:
        threading.Thread(target=die_when_seen, args=(worker,), daemon=True).start()
        EVENT.wait()  # culprit: worker_is_dead
    if worker.rank == 2:
        QUEUE.get()
    rpc.rpc_sync("worker2", await_event, timeout=0)


@hang("stopped", worker="worker1", size=3, dead_kinds=("dead",))
def driver_waits_for_a_stopped_worker(worker: Worker) -> None:
    if worker.rank == 1:
        time.sleep(LONG)  # culprit: driver_waits_for_a_stopped_worker
    if worker.rank == 0:
        spmd.use_spmd()
        values = torch.ones(8).to(spmd.device())
        spmd.sync()
        rpc.rpc_sync("worker1", until_seen, args=("driver_waits_for_a_stopped_worker",))
        os.kill(rpc.rpc_sync("worker1", os.getpid), signal.SIGSTOP)
        print((values * 2).sum().item())

"""Full queues, and threads that are all busy."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

import torch

import rpc
from tests.support.hangs.hang import LONG, hang
from tests.support.workers import Worker

EVENT = threading.Event()


def many(worker: Worker, function: Callable[[], object], count: int) -> None:
    calls = [rpc.rpc_async("worker1", function, timeout=0) for _ in range(count)]
    worker.report("called")
    for call in calls:
        call.wait()


def occupy() -> None:
    EVENT.wait()  # culprit: all_threads_are_busy


@hang("event", "busy", options=(("num_worker_threads", 2),))
def all_threads_are_busy(worker: Worker) -> None:
    if worker.rank == 0:
        many(worker, occupy, 800)


def freeze(path: str) -> None:
    with open(path, "w"):
        pass
    ctypes.PyDLL(None).sleep(int(LONG))  # culprit: send_queue_is_full


@hang("frozen", options=(("send_queue_bytes", 1 << 20), ("shared_memory_bytes", 0)))
def send_queue_is_full(worker: Worker) -> None:
    if worker.rank == 0:
        path = worker.folder / "fifo"
        os.mkfifo(path)
        rpc.rpc_async("worker1", freeze, args=(str(path),), timeout=0)
        path.read_text()
        data = torch.ones(1 << 17)
        for _ in range(64):
            rpc.rpc_async("worker1", torch.numel, args=(data,), timeout=0)

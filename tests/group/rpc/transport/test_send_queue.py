"""A peer that does not read: callers wait for room in the send queue, the agent's loop waits for nobody."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

import rpc
from tests.support.orders import ask, dismiss, start_followers
from tests.support.streams import until
from tests.support.workers import RunWorkers, Workers

QUEUE_BYTES = 1 << 20
MESSAGE = 64 << 10
MESSAGES = 200
"""Many times what queue and sockets hold."""

sender = ThreadPoolExecutor(1)
sending: list[Future[list[rpc.Future[Any]]]] = []


def start(run_workers: RunWorkers) -> Workers:
    """Three workers with small send queues; the first is connected to the others."""
    workers = start_followers(run_workers, 3, send_queue_bytes=QUEUE_BYTES)
    assert ask(workers[0], call_the_third, 1) == 1
    assert ask(workers[0], rpc.rpc_sync, "worker1", int) == 0
    return workers


def send_all() -> list[rpc.Future[Any]]:
    message = torch.ones(MESSAGE // 4)
    return [rpc.rpc_async("worker1", torch.sum, args=(message * number,)) for number in range(MESSAGES)]


def begin_to_send() -> None:
    """Sends from another thread; returns when that thread waits for room."""
    sending.append(sender.submit(send_all))
    (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
    until(lambda: waits(thread))


def waits(thread: threading.Thread) -> bool:
    frame = sys._current_frames()[thread.ident or 0]
    return frame.f_code.co_name == "wait_for"


def is_sending() -> bool:
    return not sending[0].done()


def finish_sending() -> list[float]:
    return [float(future.wait()) for future in sending.pop().result()]


def call_the_third(count: int) -> int:
    return sum(int(rpc.rpc_sync("worker2", torch.add, args=(1, 0))) for _ in range(count))


def be_called_back(count: int) -> int:
    return sum(int(rpc.rpc_sync("worker0", torch.add, args=(1, 0))) for _ in range(count))


EXPECTED = [float(MESSAGE // 4 * number) for number in range(MESSAGES)]


def test_callers_wait_for_a_stopped_peer_and_others_are_served(run_workers: RunWorkers) -> None:
    workers = start(run_workers)
    workers[1].stop()
    ask(workers[0], begin_to_send)
    assert ask(workers[0], call_the_third, 100) == 100
    assert ask(workers[2], be_called_back, 100) == 100
    assert ask(workers[0], is_sending)
    workers[1].resume()
    assert ask(workers[0], finish_sending) == EXPECTED
    dismiss(workers)


def ask_for_much() -> None:
    sending.append(
        sender.submit(lambda: [rpc.rpc_async("worker1", reply, args=(n,)) for n in range(MESSAGES)])
    )
    sending[0].result()


def reply(number: int) -> torch.Tensor:
    return torch.full((MESSAGE // 4,), float(number))


def take_replies() -> list[float]:
    return [float(future.wait().sum()) for future in sending.pop().result()]


def test_a_caller_that_stops_does_not_hold_up_the_callee(run_workers: RunWorkers) -> None:
    """Its replies fill the queue; the threads that wait to send them are replaced by others."""
    workers = start(run_workers)
    ask(workers[0], ask_for_much)
    workers[0].stop()
    assert ask(workers[1], call_the_third, 50) == 50
    assert ask(workers[2], call_the_second, 50) == 50
    workers[0].resume()
    assert ask(workers[0], take_replies) == EXPECTED
    dismiss(workers)


def call_the_second(count: int) -> int:
    return sum(int(rpc.rpc_sync("worker1", torch.add, args=(1, 0))) for _ in range(count))

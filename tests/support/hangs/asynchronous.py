"""Coroutines, futures and remote objects whose result does not come."""

from __future__ import annotations

import asyncio
import queue
import time

import torch

import rpc
from tests.support.hangs.hang import LONG, from_worker0, hang
from tests.support.workers import Worker

QUEUE = queue.Queue[None]()


async def await_nothing() -> None:
    await asyncio.Event().wait()  # culprit: coroutine_awaits_an_event


@hang("awaits")
def coroutine_awaits_an_event(worker: Worker) -> None:
    from_worker0(worker, await_nothing)


def sleep_for_a_coroutine() -> None:
    time.sleep(LONG)  # culprit: coroutine_awaits_a_call


async def await_call() -> None:
    await rpc.rpc_async("worker2", sleep_for_a_coroutine, timeout=0)


@hang("sleeps", worker="worker2", size=3)
def coroutine_awaits_a_call(worker: Worker) -> None:
    from_worker0(worker, await_call)


async def block_the_loop() -> None:
    time.sleep(LONG)  # noqa: ASYNC251 # culprit: coroutine_blocks_its_loop


@hang("sleeps")
def coroutine_blocks_its_loop(worker: Worker) -> None:
    from_worker0(worker, block_the_loop)


@rpc.functions.async_execution
def never_done() -> torch.futures.Future[None]:
    return torch.futures.Future()


@hang("postponed", worker="worker0")
def future_is_never_completed(worker: Worker) -> None:
    if worker.rank == 0:
        rpc.rpc_sync("worker1", never_done, timeout=0)  # culprit: future_is_never_completed


def make_slowly() -> int:
    time.sleep(LONG)  # culprit: object_is_never_made
    return 1


@hang("sleeps")
def object_is_never_made(worker: Worker) -> None:
    if worker.rank == 0:
        rpc.remote("worker1", make_slowly, timeout=0).to_here(timeout=0)


class Counter:
    def count(self) -> None:
        QUEUE.get()  # culprit: method_of_a_remote_object_waits


@hang("queue")
def method_of_a_remote_object_waits(worker: Worker) -> None:
    if worker.rank == 0:
        counter = rpc.remote("worker1", Counter)
        counter.rpc_sync(timeout=0).count()


def sleep_at_the_end() -> None:
    time.sleep(LONG)  # culprit: chain_of_calls


def pass_on() -> None:
    rpc.rpc_sync("worker2", pass_on_again, timeout=0)


def pass_on_again() -> None:
    rpc.rpc_sync("worker3", sleep_at_the_end, timeout=0)


@hang("sleeps", worker="worker3", size=4)
def chain_of_calls(worker: Worker) -> None:
    from_worker0(worker, pass_on)

"""Places for calls: what runs in threads, and streams, that end otherwise than by a result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from farcall.serving.calls import size_of
from farcall.serving.endpoint import Endpoint
from farcall.serving.slots import Slots


async def test_a_stream_that_is_given_up_as_it_waits_for_a_place_is_closed_by_its_own_thread() -> None:
    loop, slots = asyncio.get_running_loop(), Slots(1)
    closed: asyncio.Future[str] = loop.create_future()

    def steps() -> Iterator[str]:
        try:
            yield threading.current_thread().name
            yield "never"
        finally:
            loop.call_soon_threadsafe(closed.set_result, threading.current_thread().name)

    stream = Endpoint(steps).stream((), {}, slots)
    own = await anext(stream)
    async with slots:
        step = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)  # it has begun to wait
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert await asyncio.wait_for(closed, 60) == own
    slots.close()


@pytest.mark.parametrize("large", [torch.zeros(1 << 20), np.zeros(1 << 20), b"\0" * (1 << 20)])
def test_what_is_large_is_known_to_be(large: object) -> None:
    assert size_of({"result": [large]}) >= 1 << 20


async def test_what_is_cancelled_in_the_moment_in_which_it_ends_counts_as_abandoned() -> None:
    slots, abandoned = Slots(1), threading.Event()
    with ThreadPoolExecutor(1) as own:
        task = asyncio.ensure_future(slots.in_thread(int, abandoned=abandoned.set, executor=own))
        await asyncio.sleep(0)  # the step has begun
        own.submit(int).result()  # the step has ended, and the loop is about to be told
        await asyncio.sleep(0)  # the loop has been told, and the task not yet
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert abandoned.is_set()
    assert slots.in_threads == 0
    slots.close()

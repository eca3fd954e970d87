"""Order on devices in what an ``async def`` callee starts: asyncio's tasks, and functions on threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import torch
from torch import Tensor

from farcall import rpc
from tests.group.devices.test_order import Counter
from tests.support.device_groups import in_device_group
from tests.support.devices import FIRST, SECOND, device_kind, is_all, late, mode, sleep

__all__ = ["device_kind", "mode"]


def tripled(tensor: Tensor) -> Tensor:
    sleep(tensor.device)
    return tensor * 3


async def triple(tensor: Tensor) -> Tensor:
    await asyncio.sleep(0)
    return tripled(tensor)


async def gather(tensor: Tensor) -> Tensor:
    made = late(2.0)
    one, two = await asyncio.gather(triple(tensor), triple(made))
    return one + two - made * 3


async def create_task(tensor: Tensor) -> Tensor:
    return await asyncio.create_task(triple(tensor))


async def task_group(tensor: Tensor) -> Tensor:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(create_task(tensor))
    return task.result() * 1


async def shield(tensor: Tensor) -> Tensor:
    return await asyncio.shield(triple(tensor)) * 1


async def wait_for(tensor: Tensor) -> Tensor:
    return await asyncio.wait_for(triple(tensor), 30) * 1


async def to_thread(tensor: Tensor) -> Tensor:
    return await asyncio.to_thread(tripled, tensor) * 1


async def run_in_executor(tensor: Tensor) -> Tensor:
    return await asyncio.get_running_loop().run_in_executor(None, tripled, tensor) * 1


ALL = (gather, create_task, task_group, shield, wait_for, to_thread, run_in_executor)


@in_device_group()
def test_what_a_coroutine_starts_is_in_order() -> None:
    callees: list[Callable[..., Coroutine[Any, Any, Tensor]]] = [*ALL]
    assert [
        function.__name__
        for function in callees
        if not all(is_all(rpc.rpc_sync("worker1", function, args=(late(2.0),)), 6.0) for _ in range(2))
    ] == []


async def found_in_a_task(counter: rpc.RRef[Counter]) -> Counter:
    await asyncio.sleep(0)
    return counter.local_value()


async def add_to_what_a_task_found(counter: rpc.RRef[Counter]) -> None:
    (found,) = await asyncio.gather(found_in_a_task(counter))
    found.add(1.0)


class Tripling:
    """Has one task for all requests, which the first one starts."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[Tensor, asyncio.Future[Tensor]]] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    async def triple(self, tensor: Tensor) -> Tensor:
        if self.task is None:
            self.task = asyncio.create_task(self.answer())
        answer: asyncio.Future[Tensor] = asyncio.Future()
        self.asked.put_nowait((late(1.0) + tensor, answer))
        answered = await answer
        return answered * 1

    async def answer(self) -> None:
        while True:
            tensor, answer = await self.asked.get()
            answer.set_result(tripled(tensor))


async def add_on_a_thread(counter: rpc.RRef[Counter]) -> None:
    await asyncio.to_thread(lambda: counter.local_value().add(1.0))


@in_device_group()
def test_later_requests_see_what_tasks_did_to_an_object() -> None:
    counter = rpc.remote("worker1", Counter)
    assert is_all(counter.rpc_sync().get(), 0.0)
    for total, function in enumerate((add_to_what_a_task_found, add_on_a_thread) * 2, start=1):
        rpc.rpc_sync("worker1", function, args=(counter,))
        assert is_all(counter.rpc_sync().get(), float(total))
    tripling = rpc.remote("worker1", Tripling)
    asked = [tripling.rpc_async().triple(late(float(value))) for value in range(3)]
    assert all((is_all(each.wait(), 3.0 * (value + 1)) for value, each in enumerate(asked)))


async def on_a_stream_of_its_own(index: int) -> bool:
    before = torch.accelerator.current_stream()
    with torch.Stream(device=FIRST) as stream:
        for _ in range(2 + index):
            await asyncio.sleep(0)
            if torch.accelerator.current_stream() != stream:
                return False
    return bool(torch.accelerator.current_stream() == before)


def stands() -> tuple[int, torch.Stream]:
    return torch.accelerator.current_device_index(), torch.accelerator.current_stream()


async def stands_later() -> tuple[int, torch.Stream]:
    await asyncio.sleep(0)
    return stands()


async def start_several(tensor: Tensor) -> list[bool]:
    mine = stands()
    theirs = [await asyncio.create_task(stands_later()), await asyncio.to_thread(stands)]
    alone = await asyncio.gather(*map(on_a_stream_of_its_own, range(3)))
    return [mine[0] == tensor.device.index, *(each == mine for each in theirs), *alone, stands() == mine]


@in_device_group(mode="eager")
def test_a_task_begins_where_its_creator_is_and_moves_alone() -> None:
    assert rpc.rpc_sync("worker1", start_several, args=(torch.ones(3, device=SECOND),)) == [True] * 7

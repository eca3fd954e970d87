"""Order on devices beyond one call: objects that several requests use, memory that is freed, and deaths."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from farcall import rpc
from rpc.devices.streams import Ready, Use
from tests.support.device_groups import LARGE, in_device_group, until_agreed
from tests.support.devices import (
    FIRST,
    SECOND,
    SIZE,
    device_kind,
    is_all,
    late,
    mode,
    sleep,
)

__all__ = ["device_kind", "mode"]


def occupy_streams() -> None:
    """Have all streams of PyTorch's pool do nothing for a while, also that on which a message is copied."""
    for _ in range(32):
        with torch.Stream(device=FIRST):
            sleep(FIRST)


_has_paused: Final = threading.Event()
"""Set once the step of a coroutine is over."""


class Counter:
    """Changes a tensor in place."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(SIZE, device=FIRST)

    def add(self, value: float) -> None:
        sleep(FIRST)
        self.tensor.add_(value)

    async def add_at_once(self, value: float) -> None:
        self.add(value)

    async def add_later(self, value: float) -> None:
        await asyncio.sleep(0)
        self.add(value)

    def get(self) -> Tensor:
        return self.tensor * 1

    async def get_after_adding(self, value: float, this: rpc.RRef[Counter]) -> Tensor:
        asyncio.get_running_loop().call_soon(_has_paused.set)
        await this.rpc_async().add_in_a_pause(value)  # as another request
        return self.get()

    def add_in_a_pause(self, value: float) -> None:
        _has_paused.wait(30)
        self.add(value)

    def add_and_ask(self, value: float, this: rpc.RRef[Counter]) -> Tensor:
        self.add(value)
        return ask(this)

    def add_and_have_asked(self, value: float, this: rpc.RRef[Counter]) -> Tensor:
        self.add(value)
        return rpc.remote("worker0", ask, args=(this,)).to_here()

    async def add_and_await(self, value: float, this: rpc.RRef[Counter]) -> Tensor:
        self.add(value)
        seen: Tensor = await this.rpc_async().get()
        return seen

    def add_and_look(self, value: float, this: rpc.RRef[Counter]) -> Look:
        self.add(value)
        return Look(this)


class Look:
    """Arrives as what another request sees of a counter, before the one that returns it is answered."""

    def __init__(self, counter: rpc.RRef[Counter]) -> None:
        self.counter = counter

    def __reduce__(self) -> tuple[type, tuple[bool]]:
        return bool, (is_all(self.counter.rpc_sync().get(), 9.0),)


def ask(counter: rpc.RRef[Counter]) -> Tensor:
    seen: Tensor = counter.rpc_sync().get()
    return seen


def add_here_and_ask(counter: rpc.RRef[Counter], value: float) -> Tensor:
    counter.local_value().add(value)
    return ask(counter)


@in_device_group()
def test_a_request_s_own_calls_see_what_it_did() -> None:
    counter = rpc.remote("worker1", Counter)
    for number, tell in enumerate(
        (
            counter.rpc_sync().add_and_ask,
            counter.rpc_sync().add_and_have_asked,
            counter.rpc_sync().add_and_await,
        )
    ):
        assert is_all(tell(1.0, counter), number + 1.0)
    answer = rpc.rpc_sync("worker1", add_here_and_ask, args=(counter, 1.0))
    assert is_all(answer, 4.0)


@in_device_group()
def test_what_coroutines_do_to_an_object_is_in_order() -> None:
    counter = rpc.remote("worker1", Counter)
    for total in (1.0, 3.0, 5.0):
        counter.rpc_sync().add_at_once(1.0)
        assert is_all(counter.rpc_sync().get(), total)
        counter.rpc_sync().add_later(1.0)
        assert is_all(counter.rpc_sync().get(), total + 1)
    assert is_all(counter.rpc_sync().get_after_adding(1.0, counter), total + 2)


@in_device_group()
def test_a_coroutine_may_begin_before_its_request_s_thread_is_done() -> None:
    _has_begun.set()  # nothing is kept here
    tensor = torch.ones(3, device=SECOND)
    assert rpc.rpc_sync("worker1", begin_early, args=(tensor, Held())) == tensor.device.index


@in_device_group()
def test_requests_on_one_object_follow_each_other() -> None:
    counter = rpc.remote("worker1", Counter)
    for step in range(1, 4):
        counter.rpc_sync().add(1.0)
        assert is_all(counter.rpc_sync().get(), float(step))
    assert bool(counter.rpc_sync().add_and_look(6.0, counter))
    mine = rpc.RRef(Counter())
    mine.rpc_sync().add(5.0)
    assert is_all(mine.local_value().get(), 5.0)


class Keeper:
    """Keeps a tensor, and gives out the tensor itself."""

    def __init__(self, value: float, size: int) -> None:
        self.tensor = torch.full((size,), value, device=FIRST)
        self.received = self.tensor

    def get(self) -> Tensor:
        return self.tensor

    def change(self) -> None:
        self.tensor.fill_(9.0)

    def keep(self, tensor: Tensor) -> None:
        self.received = tensor

    def kept(self) -> Tensor:
        return self.received * 1

    def send_and_change(self, name: str) -> rpc.RRef[Tensor]:
        occupy_streams()
        reference = rpc.remote(name, double, args=(self.tensor,))
        self.tensor.fill_(9.0)
        return reference


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


_has_begun: Final = threading.Event()


class Held:
    """Keeps the thread that drops it until a coroutine has begun."""

    def __del__(self) -> None:
        _has_begun.wait(30)


def begin_early(tensor: Tensor, held: Held) -> Coroutine[Any, Any, int]:
    return _current_device()


async def _current_device() -> int:
    device = torch.accelerator.current_device_index()
    _has_begun.set()
    return device


@in_device_group()
def test_what_was_sent_may_be_changed() -> None:
    for name in ("worker0", "worker1"):
        sent = torch.full((SIZE,), 2.0, device=FIRST)
        torch.accelerator.synchronize(0)
        occupy_streams()
        future = rpc.rpc_async(name, double, args=(sent,))
        reference = rpc.remote(name, double, args=(sent.view(10, -1).T,))
        sent.fill_(9.0)
        torch.accelerator.current_stream().synchronize()
        assert is_all(future.wait(), 4.0), f"rpc_async to {name}"
        assert is_all(reference.to_here(), 4.0), f"remote on {name}"
    keeper = rpc.remote("worker1", Keeper, args=(2.0, SIZE))
    assert is_all(keeper.rpc_sync().send_and_change("worker0").to_here(), 4.0), "in a request"
    until_agreed("worker0", "worker1")
    for size in (SIZE, LARGE):
        keeper = rpc.remote("worker1", Keeper, args=(2.0, size))
        sent = late(3.0, size=size)
        keeper.rpc_sync().keep(sent)
        sent.fill_(9.0)
        torch.accelerator.current_stream().synchronize()
        assert is_all(keeper.rpc_sync().kept(), 3.0), f"after a call, {size}"
        seen = keeper.rpc_sync().get()
        keeper.rpc_sync().change()
        assert is_all(seen, 2.0), f"by a later request, {size}"
        future = keeper.rpc_async().get()
        with torch.Stream(device=FIRST):
            seen = future.wait()
            keeper.rpc_sync().keep(seen)
            keeper.rpc_sync().change()
            assert is_all(seen, 9.0), f"by a request after a future, {size}"


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


@in_device_group()
def test_memory_is_kept_until_it_is_used() -> None:
    for _ in range(3):
        stream = torch.Stream(device=FIRST)
        with stream:
            sent = late(2.0)
            future = rpc.rpc_async("worker1", _sum, args=([sent, sent * 2],))
            del sent
            again = [torch.full((SIZE,), 9.0, device=FIRST) for _ in range(4)]
        with torch.Stream(device=FIRST):
            sleep(FIRST)
            doubled = future.wait() * 2
            del future
        torch.full((SIZE,), 7.0, device=FIRST)
        with stream:
            assert is_all(again[0], 9.0)
        torch.accelerator.synchronize(0)
        assert is_all(doubled, 12.0)


class Summing:
    """Replaces its tensor by another one."""

    def __init__(self) -> None:
        self.total = torch.zeros(SIZE, device=FIRST)

    def add(self, value: float) -> None:
        sleep(FIRST)
        self.total = self.total + value

    async def add_later(self, value: float) -> None:
        await asyncio.sleep(0)
        self.add(value)

    def get(self) -> Tensor:
        return self.total * 1


class SummingLater(Summing):
    """Has no tensor at first, and something that is not looked into."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.total = 0.0  # type: ignore[assignment]

    def add(self, value: float) -> None:
        with self.lock:
            sleep(FIRST)
            self.total = self.total + torch.full((SIZE,), value, device=FIRST)


class SummingModule(nn.Module, Summing):
    """Replaces an attribute of one of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Sequential(nn.Identity()))
        self.inner: Any = next(self.part.children())
        self.inner.total = torch.zeros(SIZE, device=FIRST)

    def add(self, value: float) -> None:
        sleep(FIRST)
        self.inner.total = self.inner.total + value

    def get(self) -> Tensor:
        kept: Tensor = self.inner.total
        return kept * 1


def add_to(summing: rpc.RRef[Summing], value: float) -> None:
    summing.local_value().add(value)


@pytest.mark.parametrize("kind", [Summing, SummingLater, SummingModule])
@in_device_group(mode="eager")
def test_memory_is_kept_of_what_requests_replace(kind: type[Summing]) -> None:
    summing = rpc.remote("worker1", kind)
    ways: list[Callable[[], object]] = [
        lambda: summing.rpc_sync().add(1.0),
        lambda: summing.rpc_sync().add_later(1.0),
        lambda: rpc.rpc_sync("worker1", add_to, args=(summing, 1.0)),
    ]
    for number, add in enumerate(ways, start=1):
        for _ in range(3):
            add()
        assert is_all(summing.rpc_sync().get(), 3.0 * number)


async def use_and_drop(count: int) -> int:
    """The number of objects that are freed when all their references are gone."""
    loop, freed = asyncio.get_running_loop(), asyncio.Semaphore(0)
    for _ in range(count):
        summing = Summing()
        weakref.finalize(summing, loop.call_soon_threadsafe, freed.release)
        rpc.RRef(summing).local_value()
        del summing
        await asyncio.sleep(0)
    gc.collect()
    for number in range(count):
        try:
            await asyncio.wait_for(freed.acquire(), 10)
        except TimeoutError:
            return number
    return count


@in_device_group(mode="eager")
def test_a_coroutine_does_not_keep_what_it_has_used() -> None:
    assert rpc.rpc_sync("worker1", use_and_drop, args=(20,)) == 20


async def use_many(count: int, kind: str) -> int:
    """The number of objects that a coroutine still waits for; of ``kept`` ones, that of events for them."""
    kept = []
    for _ in range(count):
        content: Any = [Summing()] if kind == "lists" else Summing()
        rpc.RRef(content).local_value()
        if kind == "kept":
            kept.append(content)
        await asyncio.sleep(0)
    del content
    counted = Ready if kind == "kept" else Use
    for _ in range(200):
        await asyncio.sleep(0.05)
        gc.collect()
        number = sum(type(each) is counted for each in gc.get_objects())
        if number < count // 2:
            break
    return number


@in_device_group(mode="eager")
def test_steps_of_a_coroutine_wait_no_longer_for_each_object_that_it_has_used() -> None:
    kinds = ("dropped", "lists", "kept")
    found = {kind: rpc.rpc_sync("worker1", use_many, args=(40, kind)) for kind in kinds}
    assert max(found.values()) < 20, found


@in_device_group()
def test_memory_is_kept_until_it_is_copied() -> None:
    for _ in range(3):
        sent = torch.full((SIZE,), 2.0, device=FIRST)
        torch.accelerator.synchronize(0)
        occupy_streams()
        future = rpc.rpc_async("worker1", _sum, args=([sent, sent],))
        del sent
        again = [torch.full((SIZE,), 9.0, device=FIRST) for _ in range(4)]
        torch.accelerator.current_stream().synchronize()
        assert is_all(future.wait(), 4.0)
        del again
    sent = torch.full((SIZE,), 2.0, device=FIRST)
    torch.accelerator.synchronize(0)
    with torch.Stream(device=FIRST):  # not the one that the memory returns to
        for _ in range(10):
            sleep(FIRST)
        future = rpc.rpc_async("worker1", _sum, args=([sent, sent],))
    del sent
    again = [torch.full((SIZE,), 9.0, device=FIRST) for _ in range(4)]
    torch.accelerator.current_stream().synchronize()
    assert is_all(future.wait(), 4.0)
    del again

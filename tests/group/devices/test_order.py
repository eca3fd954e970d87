"""Order on devices beyond one call: objects that several requests use, memory that is freed, and deaths."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Coroutine
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from farcall import rpc
from rpc.devices.streams import Ready, Use
from tests.support.device_groups import LARGE, one_to_one, until_agreed
from tests.support.devices import (
    FIRST,
    SECOND,
    SIZE,
    device_kind,
    is_all,
    late,
    mode,
    on_devices,
    sleep,
    used_bytes,
)
from tests.support.workers import RunWorkers, Worker

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


@on_devices
def ask_for_what_was_added(worker: Worker) -> list[bool]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return []
        counter = rpc.remote("worker1", Counter)
        found = []
        for number, tell in enumerate(
            (
                counter.rpc_sync().add_and_ask,
                counter.rpc_sync().add_and_have_asked,
                counter.rpc_sync().add_and_await,
            )
        ):
            found.append(is_all(tell(1.0, counter), number + 1.0))
        answer = rpc.rpc_sync("worker1", add_here_and_ask, args=(counter, 1.0))
        return [*found, is_all(answer, 4.0)]


def test_a_request_s_own_calls_see_what_it_did(run_workers: RunWorkers, mode: str) -> None:
    assert run_workers(ask_for_what_was_added, 2, args=(mode,), time_limit=60)[0] == [True] * 4


@on_devices
def count_on_one_object(worker: Worker) -> list[bool]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return []
        counter = rpc.remote("worker1", Counter)
        found = []
        for step in range(1, 4):
            counter.rpc_sync().add(1.0)
            found.append(is_all(counter.rpc_sync().get(), float(step)))
        found.append(bool(counter.rpc_sync().add_and_look(6.0, counter)))
        mine = rpc.RRef(Counter())
        mine.rpc_sync().add(5.0)
        found.append(is_all(mine.local_value().get(), 5.0))
        return found


def test_what_coroutines_do_to_an_object_is_in_order(run_workers: RunWorkers, mode: str) -> None:
    assert run_workers(count_in_coroutines, 2, args=(mode,), time_limit=60)[0] == [True] * 7


def test_a_coroutine_may_begin_before_its_request_s_thread_is_done(
    run_workers: RunWorkers, mode: str
) -> None:
    assert run_workers(is_on_its_device, 2, args=(mode,), time_limit=60)[0]


def test_requests_on_one_object_follow_each_other(run_workers: RunWorkers, mode: str) -> None:
    assert run_workers(count_on_one_object, 2, args=(mode,), time_limit=60)[0] == [True] * 5


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


@on_devices
def count_in_coroutines(worker: Worker) -> list[bool]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return []
        counter = rpc.remote("worker1", Counter)
        found = []
        for total in (1.0, 3.0, 5.0):
            counter.rpc_sync().add_at_once(1.0)
            found.append(is_all(counter.rpc_sync().get(), total))
            counter.rpc_sync().add_later(1.0)
            found.append(is_all(counter.rpc_sync().get(), total + 1))
        found.append(is_all(counter.rpc_sync().get_after_adding(1.0, counter), total + 2))
        return found


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


@on_devices
def is_on_its_device(worker: Worker) -> bool:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return True
        _has_begun.set()  # nothing is kept here
        tensor = torch.ones(3, device=SECOND)
        return rpc.rpc_sync("worker1", begin_early, args=(tensor, Held())) == tensor.device.index


@on_devices
def change_what_was_sent(worker: Worker) -> dict[str, bool]:
    with worker.group(**one_to_one(worker)):
        found: dict[str, bool] = {}
        if worker.rank:
            return found
        for name in ("worker0", "worker1"):
            sent = torch.full((SIZE,), 2.0, device=FIRST)
            torch.accelerator.synchronize(0)
            occupy_streams()
            future = rpc.rpc_async(name, double, args=(sent,))
            reference = rpc.remote(name, double, args=(sent.view(10, -1).T,))
            sent.fill_(9.0)
            torch.accelerator.current_stream().synchronize()
            found[f"rpc_async to {name}"] = is_all(future.wait(), 4.0)
            found[f"remote on {name}"] = is_all(reference.to_here(), 4.0)
        keeper = rpc.remote("worker1", Keeper, args=(2.0, SIZE))
        found["in a request"] = is_all(keeper.rpc_sync().send_and_change("worker0").to_here(), 4.0)
        until_agreed("worker0", "worker1")
        for size in (SIZE, LARGE):
            keeper = rpc.remote("worker1", Keeper, args=(2.0, size))
            sent = late(3.0, size=size)
            keeper.rpc_sync().keep(sent)
            sent.fill_(9.0)
            torch.accelerator.current_stream().synchronize()
            found[f"after a call, {size}"] = is_all(keeper.rpc_sync().kept(), 3.0)
            seen = keeper.rpc_sync().get()
            keeper.rpc_sync().change()
            found[f"by a later request, {size}"] = is_all(seen, 2.0)
            future = keeper.rpc_async().get()
            with torch.Stream(device=FIRST):
                seen = future.wait()
                keeper.rpc_sync().keep(seen)
                keeper.rpc_sync().change()
                found[f"by a request after a future, {size}"] = is_all(seen, 9.0)
        return found


def test_what_was_sent_may_be_changed(run_workers: RunWorkers, mode: str) -> None:
    found = run_workers(change_what_was_sent, 2, args=(mode,), time_limit=60)[0]
    assert [what for what, right in found.items() if not right] == []
    assert len(found) == 11


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


@on_devices
def free_early(worker: Worker) -> list[bool]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return []
        found = []
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
                found.append(is_all(again[0], 9.0))
            torch.accelerator.synchronize(0)
            found.append(is_all(doubled, 12.0))
        return found


def test_memory_is_kept_until_it_is_used(run_workers: RunWorkers, mode: str) -> None:
    assert run_workers(free_early, 2, args=(mode,), time_limit=60)[0] == [True] * 6


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


@on_devices
def replace_in_requests(worker: Worker, kind: type[Summing]) -> list[bool]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return []
        found: list[bool] = []
        summing = rpc.remote("worker1", kind)
        for add in (
            lambda: summing.rpc_sync().add(1.0),
            lambda: summing.rpc_sync().add_later(1.0),
            lambda: rpc.rpc_sync("worker1", add_to, args=(summing, 1.0)),
        ):
            for _ in range(3):
                add()
            found.append(is_all(summing.rpc_sync().get(), 3.0 * (len(found) + 1)))
        return found


@pytest.mark.parametrize("kind", [Summing, SummingLater, SummingModule])
def test_memory_is_kept_of_what_requests_replace(
    run_workers: RunWorkers, device_kind: str, kind: type[Summing]
) -> None:
    assert run_workers(replace_in_requests, 2, args=("eager", kind), time_limit=60)[0] == [True] * 3


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


@on_devices
def ask_to_use_and_drop(worker: Worker) -> int:
    with worker.group(**one_to_one(worker)):
        return 0 if worker.rank else rpc.rpc_sync("worker1", use_and_drop, args=(20,))


def test_a_coroutine_does_not_keep_what_it_has_used(run_workers: RunWorkers, device_kind: str) -> None:
    assert run_workers(ask_to_use_and_drop, 2, args=("eager",))[0] == 20


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


@on_devices
def ask_to_use_many(worker: Worker) -> dict[str, int]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return {}
        kinds = ("dropped", "lists", "kept")
        return {kind: rpc.rpc_sync("worker1", use_many, args=(40, kind)) for kind in kinds}


def test_steps_of_a_coroutine_wait_no_longer_for_each_object_that_it_has_used(
    run_workers: RunWorkers, device_kind: str
) -> None:
    found = run_workers(ask_to_use_many, 2, args=("eager",), time_limit=60)[0]
    assert max(found.values()) < 20, found


@on_devices
def free_before_the_copy(worker: Worker) -> list[bool]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return []
        found = []
        for _ in range(3):
            sent = torch.full((SIZE,), 2.0, device=FIRST)
            torch.accelerator.synchronize(0)
            occupy_streams()
            future = rpc.rpc_async("worker1", _sum, args=([sent, sent],))
            del sent
            again = [torch.full((SIZE,), 9.0, device=FIRST) for _ in range(4)]
            torch.accelerator.current_stream().synchronize()
            found.append(is_all(future.wait(), 4.0))
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
        found.append(is_all(future.wait(), 4.0))
        del again
        return found


def test_memory_is_kept_until_it_is_copied(run_workers: RunWorkers, mode: str) -> None:
    assert run_workers(free_before_the_copy, 2, args=(mode,), time_limit=60)[0] == [True] * 4


@on_devices
def call_the_dying(worker: Worker) -> list[str]:
    worker.join(**one_to_one(worker), rpc_timeout=20.0)
    if worker.rank:
        worker.report("ready")
        time.sleep(60)
    worker.report("ready")
    worker.wait_for("killed")
    before = used_bytes()
    found = []
    try:
        rpc.rpc_sync("worker1", _sum, args=([late(2.0), late(3.0)],))
    except RuntimeError as error:
        found.append(type(error).__name__)
    rpc.shutdown(graceful=False)
    gc.collect()  # the frames of the error had the arguments
    found.append(str(used_bytes() <= before))
    return found


def test_memory_for_a_worker_that_died_comes_back(run_workers: RunWorkers, device_kind: str) -> None:
    workers = run_workers.start(call_the_dying, 2, args=("random",))
    workers.wait_for("ready")
    workers[1].kill()
    workers[0].tell("killed")
    assert workers[0].result() == ["WorkerLostError", "True"]

"""Modules on devices behind ``farcall.serve``, and in profiles of calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

import farcall
from farcall import client as clients
from farcall import rpc
from farcall.serving import Batching, Endpoint, Limits
from rref.remote_module import RemoteModule
from tests.support.device_groups import in_device_group, on_device_workers
from tests.support.devices import FIRST, ONE_TO_ONE, SECOND, device_kind, late, mode, sleep
from tests.support.workers import Worker

__all__ = ["device_kind", "mode"]


class LateScale(nn.Module):
    """Multiplies on a device, where its weight and its results come late."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = nn.Parameter(late(by, size=1))

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows.to(FIRST)
        sleep(FIRST)
        return rows * self.by


class WhereItIs(LateScale):
    """Multiplies where its weight is: it takes no rows that are elsewhere."""

    def forward(self, rows: Tensor) -> Tensor:
        sleep(FIRST)
        return rows * self.by


@in_device_group()
def test_modules_on_devices_are_served() -> None:
    remote: Any = RemoteModule(f"worker1/{FIRST}", LateScale, args=(5.0,))

    def through_both(rows: Tensor) -> Tensor:
        here: Tensor = LateScale(2.0)(rows)
        there: Tensor = remote.forward(here)
        total: Tensor = there + here
        return total

    def one_by_one(rows: Tensor) -> Any:
        for row in rows:
            yield remote.forward(row.to(FIRST))

    endpoints = {"here": LateScale(3.0), "both": through_both, "rows": one_by_one}
    server = farcall.serve(endpoints)
    rows = np.arange(3, dtype=np.float32)
    try:
        with torch.no_grad(), clients.connect(f"localhost:{server.port}") as client:
            found = {name: client.call(name, rows).tolist() for name in ("here", "both")}
            found["rows"] = [each.item() for each in client.stream("rows", rows)]
    finally:
        server.stop(0.0)
    assert found == {"here": [0.0, 3.0, 6.0], "both": [0.0, 12.0, 24.0], "rows": [0.0, 5.0, 10.0]}


@pytest.mark.parametrize("maps", [{}, {"device_maps": {"worker1": ONE_TO_ONE}}], ids=["unmapped", "mapped"])
@on_device_workers()
def test_a_remote_module_on_a_device_is_served(worker: Worker, maps: dict[str, Any]) -> None:
    with worker.group(**maps):
        if worker.rank:
            return
        remote = RemoteModule(f"worker1/{FIRST}", WhereItIs, args=(5.0,))
        server = farcall.serve({"alone": remote, "batched": Endpoint(remote, batching=Batching())})
        rows = np.arange(3, dtype=np.float32)
        try:
            with clients.connect(f"localhost:{server.port}") as client:
                several = client.batch([("batched", (rows,)), ("batched", (rows + 1,))])
                found = [each.tolist() for each in (client.call("alone", rows), *several)]
        finally:
            server.stop(0.0)
        assert found == [[0.0, 5.0, 10.0], [0.0, 5.0, 10.0], [5.0, 10.0, 15.0]]


def doubled(rows: Tensor) -> Tensor:
    rows = rows.to(FIRST)
    sleep(FIRST)
    return rows * 2


def one_by_one_on_a_side_stream(rows: Tensor) -> Iterator[Tensor]:
    with torch.Stream(device=FIRST) as own:
        for row in rows:
            assert torch.accelerator.current_stream(FIRST) == own
            yield doubled(row)


async def current_stream() -> torch.Stream:
    return torch.accelerator.current_stream(FIRST)


async def each_after_others_on_a_side_stream(rows: Tensor) -> AsyncIterator[Tensor]:
    with torch.Stream(device=FIRST) as own:
        for row in rows:
            assert await asyncio.create_task(current_stream()) == own
            yield doubled(row)


def set_stream_and_device(rows: Tensor) -> Tensor:
    torch.accelerator.set_stream(torch.Stream(device=FIRST))
    found = doubled(rows)
    torch.accelerator.set_device_index(torch.device(SECOND).index)
    return found


async def set_in_a_task(rows: Tensor) -> Tensor:
    return set_stream_and_device(rows)


async def set_in_tasks(rows: Tensor) -> Tensor:
    await asyncio.gather(asyncio.to_thread(set_stream_and_device, rows), set_in_a_task(rows))
    return set_stream_and_device(rows)


def current_device(_: Tensor) -> int:
    return torch.accelerator.current_device_index()


@on_device_workers(1)
def test_what_is_left_on_streams_is_waited_for_and_is_not_left_to_others(worker: Worker) -> None:
    endpoints = {each.__name__: each for each in (set_stream_and_device, set_in_tasks)}
    streams = {
        each.__name__: each for each in (one_by_one_on_a_side_stream, each_after_others_on_a_side_stream)
    }
    plain = {each.__name__: each for each in (doubled, current_device)}
    server = farcall.serve(endpoints | streams | plain, limits=Limits(in_flight=1))  # a single thread
    small, large = np.arange(3, dtype=np.float32), np.ones(1 << 15, dtype=np.float32)
    try:
        with clients.connect(f"localhost:{server.port}") as client:
            found: dict[str, list[Any]] = {}
            for name in endpoints:
                mine = client.call(name, small).tolist()
                is_right = bool((client.call(name, large) == 2).all())
                others = (
                    client.call("doubled", small).tolist(),
                    bool((client.call("doubled", large) == 2).all()),
                )
                found[name] = [mine, is_right, *others, client.call("current_device", small)]
            for name in streams:
                found[name] = [each.item() for each in client.stream(name, small)]
                found[name].append(all((each == 2).all() for each in client.stream(name, large[None])))
    finally:
        server.stop(0.0)
    doubles = [0.0, 2.0, 4.0]
    alone, one_by_one = [doubles, True, doubles, True, 0], [*doubles, True]
    assert found == {
        "set_stream_and_device": alone,
        "set_in_tasks": alone,
        "one_by_one_on_a_side_stream": one_by_one,
        "each_after_others_on_a_side_stream": one_by_one,
    }


@in_device_group()
def test_a_profile_shows_what_a_call_does_on_a_device() -> None:
    tensor = late(2.0)
    with profile() as profiled:
        doubled = rpc.rpc_sync("worker1", torch.mul, args=(tensor, 2))
    assert bool((doubled.cpu() == 4).all())
    names = [event.name for event in profiled.events()]
    call = "rpc_sync#aten::mul(worker0 -> worker1)"
    assert call in names
    assert f"{call}#remote_op: aten::mul" in names

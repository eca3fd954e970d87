"""Modules on devices behind ``farcall.serve``, and in profiles of calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

import farcall
from farcall import client as clients
from farcall import rpc
from farcall.serving import Batching, Endpoint
from rref.remote_module import RemoteModule
from tests.support.device_groups import one_to_one
from tests.support.devices import FIRST, ONE_TO_ONE, device_kind, late, mode, on_devices, sleep
from tests.support.workers import RunWorkers, Worker

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


@on_devices
def serve_modules(worker: Worker) -> dict[str, list[float]]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return {}
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
        return found


def test_modules_on_devices_are_served(run_workers: RunWorkers, mode: str) -> None:
    found = run_workers(serve_modules, 2, args=(mode,), time_limit=60)[0]
    assert found == {"here": [0.0, 3.0, 6.0], "both": [0.0, 12.0, 24.0], "rows": [0.0, 5.0, 10.0]}


@on_devices
def serve_a_remote_module(worker: Worker, options: dict[str, Any]) -> list[Any]:
    with worker.group(**options):
        if worker.rank:
            return []
        remote = RemoteModule(f"worker1/{FIRST}", WhereItIs, args=(5.0,))
        server = farcall.serve({"alone": remote, "batched": Endpoint(remote, batching=Batching())})
        rows = np.arange(3, dtype=np.float32)
        try:
            with clients.connect(f"localhost:{server.port}") as client:
                several = client.batch([("batched", (rows,)), ("batched", (rows + 1,))])
                return [each.tolist() for each in (client.call("alone", rows), *several)]
        finally:
            server.stop(0.0)


@pytest.mark.parametrize("maps", [{}, {"device_maps": {"worker1": ONE_TO_ONE}}], ids=["unmapped", "mapped"])
def test_a_remote_module_on_a_device_is_served(
    run_workers: RunWorkers, mode: str, maps: dict[str, Any]
) -> None:
    found = run_workers(serve_a_remote_module, 2, args=(mode, maps), time_limit=60)[0]
    assert found == [[0.0, 5.0, 10.0], [0.0, 5.0, 10.0], [5.0, 10.0, 15.0]]


@on_devices
def profile_a_call(worker: Worker) -> list[str]:
    with worker.group(**one_to_one(worker)):
        if worker.rank:
            return []
        tensor = late(2.0)
        with profile() as profiled:
            doubled = rpc.rpc_sync("worker1", torch.mul, args=(tensor, 2))
        assert bool((doubled.cpu() == 4).all())
        return [event.name for event in profiled.events()]


def test_a_profile_shows_what_a_call_does_on_a_device(run_workers: RunWorkers, mode: str) -> None:
    names = run_workers(profile_a_call, 2, args=(mode,), time_limit=60)[0]
    call = "rpc_sync#aten::mul(worker0 -> worker1)"
    assert call in names
    assert f"{call}#remote_op: aten::mul" in names

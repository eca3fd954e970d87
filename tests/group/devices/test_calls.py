"""Calls with tensors on devices: where they arrive, and that streams wait for what they need and no more."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from farcall import rpc
from farcall.accelerator_trial import exchange
from rref.remote_module import RemoteModule
from tests.support.certificates import Authority
from tests.support.device_groups import in_device_group, on_device_workers, one_to_one
from tests.support.devices import (
    FIRST,
    SECOND,
    SIZE,
    THIRD,
    device_kind,
    hide_devices,
    is_all,
    late,
    mode,
    on_devices,
    sleep,
    use_device,
    used_bytes,
)
from tests.support.streams import until
from tests.support.transfers import ACROSS, MIB
from tests.support.workers import RunWorkers, Worker

__all__ = ["device_kind", "mode"]


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def double_late(tensor: torch.Tensor) -> torch.Tensor:
    sleep(tensor.device)
    return tensor * 2


@rpc.functions.async_execution
def double_through(name: str, tensor: torch.Tensor) -> rpc.Future[torch.Tensor]:
    return rpc.rpc_async(name, double_late, args=(tensor,)).then(lambda future: future.wait() + 1)


async def double_in_coroutine(name: str, tensor: torch.Tensor) -> torch.Tensor:
    sleep(tensor.device)
    mine = tensor * 2
    theirs = await rpc.rpc_async(name, double_late, args=(tensor,))
    return mine + theirs


def on_own_stream(tensor: torch.Tensor) -> bool:
    """Whether a request runs on a stream that is not a default one, and on the device of its argument."""
    current = torch.accelerator.current_stream()
    return current.device == tensor.device and current.stream_id != 0


@in_device_group(3)
def test_streams_wait_for_what_they_use() -> None:
    with torch.Stream(device=FIRST):
        result = rpc.rpc_sync("worker1", double_late, args=(late(3.0),))
        assert result.device == torch.device(FIRST), "device"
        assert is_all(result, 6.0), "rpc_sync"
    future = rpc.rpc_async("worker1", double_late, args=(late(4.0),))
    with torch.Stream(device=FIRST):
        assert is_all(future.wait(), 8.0), "wait"
    with torch.Stream(device=FIRST):
        assert is_all(future.value(), 8.0), "value"
    chained = rpc.rpc_async("worker1", double_late, args=(late(5.0),)).then(lambda future: future.wait() * 2)
    with torch.Stream(device=FIRST):
        assert is_all(chained.wait(), 20.0), "then"
    many = [rpc.rpc_async("worker1", double_late, args=(late(float(each)),)) for each in range(4)]
    for future in rpc.as_completed(many):
        with torch.Stream(device=FIRST):
            assert is_all(future.wait(), many.index(future) * 2.0), f"as_completed {many.index(future)}"

    async def awaits() -> bool:
        call = rpc.rpc_async("worker1", double_late, args=(late(6.0),))
        with torch.Stream(device=FIRST):
            return is_all(await call, 12.0)

    assert asyncio.run(awaits()), "await"
    assert rpc.rpc_sync("worker1", on_own_stream, args=(late(1.0, SECOND),)), "own stream"
    assert is_all(rpc.rpc_sync("worker1", double_through, args=("worker2", late(7.0))), 15.0), (
        "async_execution"
    )
    assert is_all(rpc.rpc_sync("worker1", double_in_coroutine, args=("worker2", late(8.0))), 32.0), (
        "coroutine"
    )
    callee = rpc.remote("worker1", double_late, args=(late(9.0),))
    assert is_all(callee.to_here(), 18.0), "to_here"


def double_over_tls(worker: Worker, tls: rpc.TlsOptions) -> None:
    token = "a token that only the tests know"
    with worker.group(**one_to_one(worker), **ACROSS, tls=tls, token=token):
        for size in (SIZE, 2 * MIB) if not worker.rank else ():
            with torch.Stream(device=FIRST):
                result = rpc.rpc_sync("worker1", double_late, args=(late(3.0, size=size),))
                assert result.device == torch.device(FIRST)
                assert is_all(result, 6.0)
                assert is_all(rpc.remote("worker1", double_late, args=(late(4.0, size=size),)).to_here(), 8.0)


def test_tensors_on_devices_go_over_tls(run_workers: RunWorkers, mode: str, tmp_path: Path) -> None:
    run_workers(on_devices(double_over_tls), 2, args=(mode, Authority(tmp_path).issue()))


def ones(size: int, device: str) -> torch.Tensor:
    return torch.ones(size, device=device)


def kept_of_nested_calls(name: str) -> int:
    """The device memory that is kept, in bytes, when the answers to some calls have been dropped."""
    before = used_bytes()
    for _ in range(3):
        rpc.rpc_sync(name, ones, args=(SIZE, FIRST))
    with contextlib.suppress(AssertionError):
        until(lambda: used_bytes() <= before)  # another thread may still have the last one
    return max(0, used_bytes() - before)


def device_after_nested_call(name: str, *_: torch.Tensor) -> int:
    """The number of the current device, after a call whose answer is on the second one."""
    rpc.rpc_sync(name, ones, args=(1, SECOND))
    return torch.accelerator.current_device_index()


@in_device_group(mode="eager")
def test_only_a_call_s_own_tensors_choose_its_device() -> None:
    third = torch.ones(1, device=THIRD)
    device_after = functools.partial(rpc.rpc_sync, "worker1", device_after_nested_call)
    assert device_after(args=("worker0",)) == 0
    assert device_after(args=("worker0", third)) == third.device.index


@in_device_group(mode="eager")
def test_answers_are_not_kept_until_the_request_that_called_ends() -> None:
    found = {"in a call": rpc.rpc_sync("worker1", kept_of_nested_calls, args=("worker0",))}
    future = rpc.rpc_async("worker1", ones, args=(1, FIRST))
    found["in a callback"] = future.then(lambda _: kept_of_nested_calls("worker1")).wait()
    assert found == {"in a call": 0, "in a callback": 0}


def _same(value: Any) -> Any:
    return value


@in_device_group(mode="random")
def test_kinds_of_tensors() -> None:
    wrong: list[str] = []
    base = torch.arange(24.0, device=FIRST).reshape(4, 6)
    kinds: dict[str, torch.Tensor] = {
        "contiguous": base,
        "large": torch.arange(1 << 20, device=FIRST),
        "transposed": base.T,
        "with gaps": base[:, ::3],
        "expanded": base[:1].expand(3, 6),
        "part": base[1],
        "scalar": torch.tensor(5, device=FIRST),
        "empty": torch.empty(0, 3, device=FIRST),
        "boolean": base > 3,
        "complex": torch.complex(base, base),
        "conjugated": torch.complex(base, base).conj(),
        "bfloat16": base.to(torch.bfloat16),
        "second device": torch.arange(3, device=SECOND),
        "parameter": torch.nn.Parameter(base.clone()),
        "cpu": torch.arange(3),
    }
    back = rpc.rpc_sync("worker1", _same, args=(kinds,))
    for name, tensor in kinds.items():
        same = back[name].device == tensor.device and type(back[name]) is type(tensor)
        if tensor.is_conj():  # which the simulated device cannot copy
            same = same and back[name].is_conj()
            back[name], tensor = back[name].conj(), tensor.conj()  # noqa: PLW2901
        if not same or not torch.equal(back[name].cpu(), tensor.cpu()):
            wrong.append(name)
    twice = rpc.rpc_sync("worker1", _same, args=([base, base],))
    if twice[0] is not twice[1]:
        wrong.append("one tensor twice")
    storage = rpc.rpc_sync("worker1", _same, args=([base.untyped_storage()],))[0]
    if storage.device.type != base.device.type or storage.nbytes() != base.nbytes:
        wrong.append("storage")
    assert wrong == []


@on_devices
def fail_without_map(worker: Worker) -> list[str]:
    said: list[str] = []
    with worker.group(**({"device_maps": {"worker1": {FIRST: SECOND}}} if not worker.rank else {})):
        if worker.rank:
            return said
        arguments = [("worker2", late(1.0))]
        if SECOND != FIRST:
            arguments.append(("worker1", torch.ones(2, device=SECOND)))
        for callee, argument in arguments:
            try:
                rpc.rpc_sync(callee, double, args=(argument,))
            except RuntimeError as error:
                said.append(str(error))
        try:
            rpc.rpc_sync("worker2", late, args=(1.0,))
        except RuntimeError as error:
            said.append(str(error))
        result = rpc.rpc_sync("worker1", double, args=(late(2.0),))
        said.append(str(is_all(result, 4.0)))
    return said


def test_without_device_map_the_error_says_what_to_write(run_workers: RunWorkers, device_kind: str) -> None:
    said = run_workers(fail_without_map, 3, args=("eager",))[0]
    assert len(said) == (4 if SECOND != FIRST else 3)
    for text in said[:-1]:
        assert "set_device_map(" in text, text
    if SECOND != FIRST:
        assert f"{{'{SECOND}': '{FIRST}'}}" in said[1], "the target is free"
    assert said[-1] == "True"


@on_device_workers(3)
def test_maps_from_and_to_the_cpu(worker: Worker) -> None:
    maps = {"worker1": {"cpu": FIRST}, "worker2": {FIRST: "cpu"}}
    with worker.group(**({"device_maps": maps} if not worker.rank else {})):
        if worker.rank:
            return
        up = rpc.rpc_sync("worker1", _device_and_value, args=(torch.ones(3),))
        down = rpc.rpc_sync("worker2", _device_and_value, args=(late(1.0),))
        assert (up[0], up[1].device.type, down[0], str(down[1].device)) == (FIRST, "cpu", "cpu", FIRST)
        assert is_all(down[1], 1.0)


def _device_and_value(tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    return str(tensor.device), tensor


def call_without_an_accelerator(worker: Worker, source: str) -> list[bool]:
    if worker.rank:
        hide_devices()
    elif source != "cpu":
        use_device("lazy")
    with worker.group(**({"device_maps": {"worker1": {source: "cpu"}}} if not worker.rank else {})):
        if worker.rank:
            return []
        argument = torch.ones(SIZE) if source == "cpu" else late(1.0, source)
        found = [
            rpc.rpc_sync("worker1", double, args=(argument,)),
            rpc.rpc_async("worker1", double_on_the_cpu, args=(argument,)).wait(),
            rpc.remote("worker1", double, args=(argument,)).to_here(),
        ]
        return [bool((each == 2).all()) if source == "cpu" else is_all(each, 2.0) for each in found]


async def double_on_the_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu() * 2


@pytest.mark.parametrize("source", ["cpu", FIRST])
def test_a_worker_without_an_accelerator_can_be_called(
    run_workers: RunWorkers, device_kind: str, source: str
) -> None:
    assert run_workers(call_without_an_accelerator, 2, args=(source,))[0] == [True] * 3


@on_devices
def measure_as_the_doctor(worker: Worker) -> str:
    return exchange(worker.init_method, worker.rank)


def test_the_doctor_says_how_tensors_travel_and_how_fast(run_workers: RunWorkers, device_kind: str) -> None:
    said = run_workers(measure_as_the_doctor, 2, args=("eager",), time_limit=60)[0]
    assert re.fullmatch(r"(read in place|copied through pinned memory), \d+\.\d\d GB/s there and back", said)


@in_device_group()
def test_a_remote_module_without_an_index_is_on_the_first_device() -> None:
    module = RemoteModule(f"worker1/{torch.device(FIRST).type}", torch.nn.Linear, args=(3, 2))
    with torch.no_grad():
        for each in (SECOND, FIRST, "cpu"):
            assert module(torch.ones(1, 3, device=each)).device == torch.device(FIRST)

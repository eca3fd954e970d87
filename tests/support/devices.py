"""Tests of tensors on devices: on the simulated accelerator, or on the one that FARCALL_TEST_DEVICE names.

A worker calls ``use_device`` first. ``late`` and ``is_all`` are how missing waits show: values that come late
on a stream, and what the current stream sees of a tensor without any further wait.
"""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

import pytest
import torch
from torch import optim
from torch.utils.backend_registration import rename_privateuse1_backend

from tests.support.workers import Worker

P = ParamSpec("P")
R = TypeVar("R")

KIND: Final = os.environ.get("FARCALL_TEST_DEVICE", "sim")
"""The type of the devices that are tested."""

_NIGHTLY: Final = [pytest.param(each, marks=pytest.mark.nightly) for each in ("eager", "random")]
MODES: Final = ("lazy", *_NIGHTLY) if KIND == "sim" else ("eager",)
"""How the simulated accelerator runs its streams: the mode that shows the most is tested by default."""

COUNT: Final = int(os.environ.get("FARCALL_TEST_DEVICES", "4" if KIND == "sim" else "1"))
"""How many devices there are."""

FIRST, SECOND, THIRD = (f"{KIND}:{index % COUNT}" for index in range(3))
"""Three devices, which are one where there is only one."""

SEED: Final = int(os.environ.get("FARCALL_TEST_SEED", "0"))
"""Seed of the delays of streams in the mode ``random``, together with each worker's rank."""

ONE_TO_ONE: Final[dict[Any, Any]] = {FIRST: FIRST, SECOND: SECOND, THIRD: THIRD}

SLEEP_US: Final = 20_000

SIZE: Final = 1000


def is_missing() -> str:
    """Why these tests cannot run here; "" if they can."""
    if KIND != "sim":
        return ""
    from tests.accelerator.build import UnavailableError, library

    try:
        library()
    except UnavailableError as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def device_kind() -> str:
    """The type of the devices, once the simulated one is built."""
    missing = is_missing()
    if missing:
        NOT_TESTED.append(missing)
        pytest.skip(f"no simulated accelerator: {missing}")
    return KIND


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, device_kind: str) -> str:
    """How streams run."""
    value: str = request.param
    return value


NOT_TESTED: Final[list[str]] = []
"""Why tests of devices were skipped, for the end of the run."""


def use_device(mode: str = "eager", seed: int = 7) -> None:
    """Set the device up in this process."""
    if KIND != "sim":
        return
    from tests.accelerator import device

    device.schedule(mode, 1000 * SEED + seed)


def hide_devices() -> None:
    """Have this process see no devices, before it uses any."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if KIND == "sim":
        rename_privateuse1_backend(KIND)  # it knows the name alone
        torch.accelerator.current_accelerator = lambda check_available=False: None


def allow_reads_of_freed() -> None:
    """Let streams read freed memory until its own stream allocates again, as FSDP does; of the simulator."""
    if KIND == "sim":
        from tests.accelerator import device

        device.allow_reads_of_freed()


def on_devices(
    task: Callable[..., R],
) -> Callable[..., R]:
    """Of a worker's task: its first argument after the worker is the mode in which streams run. The worker is
    not observed: on Python 3.11 and 3.12 a look can hold what a frame has deleted (docs/observing.md), and
    tests count memory.
    """

    @functools.wraps(task)
    def run(worker: Worker, mode: str, *args: Any, **kwargs: Any) -> R:
        os.environ["FARCALL_OBSERVE"] = "0"
        use_device(mode, worker.rank + 1)
        return task(worker, *args, **kwargs)

    return run


def sleep(device: str | torch.device, times: int = 1) -> None:
    """Have the current stream of a device do nothing for a while, or for as long as ``times`` such whiles."""
    with torch.accelerator.device_index(torch.device(device).index):
        if KIND == "sim":
            from tests.accelerator import device as simulated

            simulated.sleep(SLEEP_US * times)
        else:
            torch.get_device_module()._sleep(SLEEP_US * 1500 * times)


def late(value: float, device: str = FIRST, size: int = SIZE) -> torch.Tensor:
    """A tensor that gets its value late on the current stream."""
    tensor = torch.zeros(size, device=device)
    sleep(device)
    return tensor.fill_(value)


class LateSGD(optim.SGD):
    """Its steps come late on the current streams of its parameters' devices."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for device in {each.device for group in self.param_groups for each in group["params"]}:
            sleep(device)
        super().step(closure)


def seen(tensor: torch.Tensor) -> torch.Tensor:
    """What the current stream of a tensor's device sees of it, without any other wait."""
    stream = torch.accelerator.current_stream(tensor.device)
    host = torch.empty(tensor.shape, dtype=tensor.dtype).pin_memory()
    host.copy_(tensor.detach(), non_blocking=True)
    stream.synchronize()
    return host


def is_all(tensor: torch.Tensor, value: float) -> bool:
    """Whether the current stream sees ``value`` everywhere in a tensor."""
    return bool((seen(tensor) == value).all())


def used_bytes(device: str = FIRST) -> int:
    """Device memory that is in use, in bytes."""
    torch.accelerator.synchronize(torch.device(device).index)
    return int(torch.accelerator.memory_allocated(torch.device(device).index))


class Used(NamedTuple):
    """What tensors of messages may leave behind in a worker."""

    device_bytes: int
    pinned_bytes: int
    """Pinned memory of the host."""
    exported_blocks: int
    """Blocks of device memory that other workers have, or may still open."""


def used(device: str = FIRST) -> Used:
    """What is in use; of the simulated accelerator alone, pinned memory and exported blocks are known."""
    of_device = used_bytes(device)
    if KIND != "sim":
        return Used(of_device, 0, 0)
    from tests.accelerator import device as simulated

    index = torch.device(device).index
    return Used(of_device, simulated.pinned_bytes(), simulated.exported_blocks(index))


def left(before: Used, seconds: float = 20.0) -> Used:
    """What is in use beyond what was before, once it has had time to come back."""
    end = time.monotonic() + seconds
    while True:
        gc.collect()
        now = Used(*(max(0, mine - theirs) for mine, theirs in zip(used(), before, strict=True)))
        if not any(now) or time.monotonic() > end:
            return now
        time.sleep(0.02)

"""``torch_xla.core.xla_model``: the device, steps, and what training loops use around them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from farcall.compat.torch_xla.mode import begin_alone
from farcall.compat.torch_xla.replicas import (
    REDUCE_MAX,
    REDUCE_MIN,
    REDUCE_SUM,
    _fetch_gradients,
    _maybe_convert_to_cpu,
    all_gather,
    all_reduce,
    all_reduce_bucketized_gradients,
    all_to_all,
    broadcast_master_param,
    collective_broadcast,
    do_on_ordinals,
    reduce_gradients,
    reduce_scatter,
    set_replication,
)
from rpc.runtime.torch_internals import pytree
from spmd.engine.api import is_logical, upload
from spmd.engine.driver import start
from spmd.sharding.loader import InputSharding, send

__all__ = [
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_SUM",
    "RateTracker",
    "_fetch_gradients",
    "_maybe_convert_to_cpu",
    "add_step_closure",
    "all_gather",
    "all_reduce",
    "all_reduce_bucketized_gradients",
    "all_to_all",
    "broadcast_master_param",
    "collective_broadcast",
    "do_on_ordinals",
    "fork_rng",
    "get_local_ordinal",
    "get_memory_info",
    "get_ordinal",
    "get_rng_state",
    "get_xla_supported_devices",
    "is_master_ordinal",
    "is_xla_tensor",
    "mark_step",
    "master_print",
    "mesh_reduce",
    "optimization_barrier_",
    "optimizer_step",
    "reduce_gradients",
    "reduce_scatter",
    "rendezvous",
    "save",
    "send_cpu_data_to_device",
    "set_replication",
    "set_rng_state",
    "unlazy",
    "wait_device_ops",
    "xla_device",
    "xla_device_hw",
    "xla_device_kind",
    "xla_real_devices",
    "xla_replication_devices",
    "xrt_world_size",
]

_closures: Final[list[Callable[[], object]]] = []


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The logical device; one of one worker, unless ``use_spmd`` was called before."""
    begin_alone()
    return start.device()


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on it."""
    return is_logical(tensor)


def get_xla_supported_devices(devkind: str | None = None, max_devices: int | None = None) -> list[str]:
    """Its name."""
    return [str(xla_device())]


def xla_device_hw(device: object) -> str:
    """The kind of hardware behind it."""
    return "CPU"


def xla_device_kind(device: object = None) -> str:
    """The kind of hardware behind it."""
    return "cpu"


def xla_replication_devices(local_devices: Sequence[object] | None = None) -> list[str]:
    """Return the devices that a step is replicated over: none, since there is one logical device."""
    return []


def xla_real_devices(devices: Sequence[object] | None = None) -> list[str]:
    """Return the hardware behind each logical device."""
    return ["CPU:0"] * (1 if devices is None else len(devices))


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """Run what is recorded, and then the closures that :func:`add_step_closure` has registered."""
    if start.is_spmd():
        start.sync()
    due, _closures[:] = list(_closures), []
    for closure in due:
        closure()


def wait_device_ops(devices: Sequence[object] = ()) -> None:
    """Wait until the workers have done everything."""
    mark_step()


def add_step_closure(
    closure: Callable[..., object], args: tuple[Any, ...] = (), run_async: bool = False
) -> None:
    """Call a function after the next step."""
    _closures.append(lambda: closure(*args))


def send_cpu_data_to_device(
    datas: Any, device: torch.device | str, input_sharding: InputSharding = None
) -> list[Any]:
    """Tensors on the device, cut as is said."""
    several = datas if isinstance(datas, (list, tuple)) else [datas]
    sent = [send(data, xla_device(), input_sharding) for data in several]
    for each in pytree.tree_leaves(sent):
        if is_logical(each):
            upload(each)
    return sent


def unlazy(tensors: Sequence[torch.Tensor]) -> None:
    """Compute tensors."""
    mark_step()


def optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """Do nothing, since recorded operations are not reordered."""


def get_memory_info(device: object = None) -> dict[str, int]:
    """Bytes of memory of this machine: in use, and in all."""
    page, total, free = (os.sysconf(f"SC_{name}") for name in ("PAGE_SIZE", "PHYS_PAGES", "AVPHYS_PAGES"))
    return {"bytes_used": page * (total - free), "bytes_limit": page * total}


@contextlib.contextmanager
def fork_rng(device: object = None, enabled: bool = True) -> Iterator[None]:
    """Restore the states of generators at the end of the block."""
    with torch.random.fork_rng([0], enabled=enabled, device_type="spmd"):
        yield


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, Any] | None = None,
    groups: object = None,
    pin_layout: bool = True,
) -> Any:
    """A step; gradients are those of the whole batch already."""
    loss = optimizer.step(**(optimizer_args or {}))
    if barrier:
        mark_step()
    return loss


def save(data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """Save with all tensors on the CPU."""
    torch.save(_maybe_convert_to_cpu(data), file_or_path)


def set_rng_state(seed: int, device: object = None) -> None:
    """Seed the generators."""
    torch.manual_seed(seed)


def get_rng_state(device: object = None) -> int:
    """The seed of the generators."""
    return torch.initial_seed()


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Return the payloads of all processes: there is one."""
    return [payload]


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """A function of what all processes have: the one."""
    return reduce_fn([data])


def master_print(*args: Any, fd: Any = None, local: bool = False, flush: bool = False) -> None:
    """Print."""
    print(*args, file=fd or sys.stdout, flush=flush)


def is_master_ordinal(local: bool = True) -> bool:
    """There is no other process."""
    return True


def get_ordinal(defval: int = 0) -> int:
    """That of the one process."""
    return 0


get_local_ordinal = get_ordinal


def xrt_world_size(defval: int = 1) -> int:
    """How many processes."""
    return 1


class RateTracker:
    """How many samples a second.

    Args:
        smooth_factor: how much the rate until now counts, 0 to 1.
    """

    def __init__(self, smooth_factor: float | None = None) -> None:
        self._smooth = (
            float(os.environ.get("RATE_TRACKER_SMOOTHING", "0.4")) if smooth_factor is None else smooth_factor
        )
        self._begin = self._last = time.perf_counter()
        self._count = self._counted = 0.0
        self._rate = 0.0

    def add(self, count: float) -> None:
        """Add ``count``."""
        self._count += count

    def rate(self) -> float:
        """Samples a second, smoothed."""
        now = time.perf_counter()
        recent = (self._count - self._counted) / max(now - self._last, 1e-9)
        self._rate = recent if not self._counted else self._smooth * self._rate + (1 - self._smooth) * recent
        self._last, self._counted = now, self._count
        return self._rate

    def global_rate(self) -> float:
        """Samples a second since the beginning."""
        return self._count / max(time.perf_counter() - self._begin, 1e-9)

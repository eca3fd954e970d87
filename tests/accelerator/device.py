"""The simulated accelerator as PyTorch's device ``sim``, which importing this sets up, for good."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from rpc.devices import ipc
from tests.accelerator.build import library

__all__ = [
    "allow_reads_of_freed",
    "export",
    "exported_blocks",
    "ipc_record",
    "ipc_wait",
    "open_exported",
    "pinned_bytes",
    "schedule",
    "sleep",
    "waited",
]

Mode = Literal["eager", "random", "lazy"]

_spec = importlib.util.spec_from_file_location("simulated_accelerator", library())
assert _spec is not None
assert _spec.loader is not None
_c: Any = importlib.util.module_from_spec(_spec)
sys.modules["simulated_accelerator"] = _c
_spec.loader.exec_module(_c)

rename_privateuse1_backend("sim")


def schedule(
    mode: str = "eager",
    seed: int = 0,
    max_delay_us: int = 200,
    probability: float = 0.5,
    patience_us: int = 100_000,
) -> None:
    """Set how streams run: ``eager``; ``random``, after random delays; or ``lazy``: only when waited for.

    Args:
        seed: of the random delays.
        max_delay_us: the longest of them, in microseconds.
        probability: of a delay, for each task.
        patience_us: time after which a task runs that nothing waits for, in microseconds.
    """
    _c.set_schedule(mode, seed, max_delay_us, probability, patience_us)


def allow_reads_of_freed() -> None:
    """Poison freed memory only when the stream that it belongs to allocates again, from now on.

    FSDP frees gradients that another stream reads, and makes their stream wait for it before it allocates.
    """
    _c.allow_reads_of_freed()


sleep = _c.sleep
waited = _c.waited
pinned_bytes = _c.pinned_bytes
exported_blocks = _c.exported_blocks


def export(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A picklable handle of a tensor's memory for one other process, together with an event."""
    storage = tensor.untyped_storage()
    layout = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    return (_c.export_memory(tensor), storage.nbytes(), *layout)


def open_exported(handle: tuple[Any, ...]) -> torch.Tensor:
    """The tensor of another process; its memory is let go when the tensor is freed."""
    memory, nbytes, dtype, shape, stride, offset = handle
    whole = _c.import_memory(*memory, nbytes)
    return torch.empty(0, dtype=dtype, device=whole.device).set_(
        whole.untyped_storage(), offset, shape, stride
    )


def ipc_record(tensor: torch.Tensor, handle: tuple[Any, ...]) -> int:
    """Record the event of a handle on the current stream; returns what the other process waits for."""
    value: int = _c.ipc_record(tensor, handle[0][3])
    return value


def ipc_wait(tensor: torch.Tensor, handle: tuple[Any, ...], value: int) -> None:
    """Have the current stream wait for what the other process has recorded."""
    _c.ipc_wait(tensor, handle[0][3], value)


class _Handles:
    """Memory of the simulated accelerator for other processes; see ``rpc.devices.ipc``."""

    def identity(self, index: int) -> str:
        return f"simulated {index}"

    def export(self, elements: torch.Tensor) -> list[Any]:
        with torch.accelerator.device_index(elements.device.index):
            memory = _c.export_memory(elements)
            recorded = _c.ipc_record(elements, memory[3])
        nbytes, offset = elements.untyped_storage().nbytes(), elements.storage_offset()
        return [list(memory), nbytes, offset, elements.numel(), recorded]

    def open(self, handle: Any, index: int) -> torch.Tensor:
        memory, nbytes, offset, numel, recorded = handle
        with torch.accelerator.device_index(index):
            whole = _imported(memory, nbytes)
            _c.ipc_wait(whole, memory[3], recorded)
        return whole[offset : offset + numel]

    def release(self, handle: Any) -> None:
        _c.release_export(*handle[0])


def _imported(memory: Any, nbytes: int) -> torch.Tensor:
    """Memory of another process, which the driver maps for one tensor at a time."""
    for _ in range(5000):
        try:
            whole: torch.Tensor = _c.import_memory(*memory, nbytes)
        except RuntimeError as error:
            if "imported already" not in str(error):
                raise
            time.sleep(0.001)
        else:
            return whole
    raise RuntimeError("the memory of another process is not freed by another thread")


ipc.register("sim", _Handles)


def _index(device: Any) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index: int | None = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


_generators = threading.Lock()
"""PyTorch locks a generator while it holds the interpreter, and the generator lets go of that to wait for its
device: so one thread at a time asks a generator."""


class _DeviceModule(types.ModuleType):
    """``torch.sim``: what programs expect under ``torch.cuda``."""

    Event = staticmethod(lambda *args, **kwargs: torch.Event("sim", *args, **kwargs))
    Stream = staticmethod(
        lambda device=None, **kwargs: torch.Stream(torch.device("sim", _index(device)), **kwargs)
    )

    _initialized = True
    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(_c.in_bad_fork)
    _lazy_init = init = staticmethod(lambda: None)
    device_count = staticmethod(_c.device_count)
    current_device = staticmethod(torch.accelerator.current_device_index)
    set_device = staticmethod(torch.accelerator.set_device_index)
    synchronize = staticmethod(torch.accelerator.synchronize)
    current_stream = staticmethod(torch.accelerator.current_stream)
    set_stream = staticmethod(torch.accelerator.set_stream)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    _sleep = staticmethod(_c.sleep)

    @staticmethod
    def device(device: Any) -> Any:
        return torch.accelerator.device_index(_index(device))

    @staticmethod
    @contextlib.contextmanager
    def stream(stream: torch.Stream | None) -> Iterator[None]:
        with stream or contextlib.nullcontext():
            yield

    @staticmethod
    def manual_seed(seed: int) -> None:
        _c.seed(-1, seed)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        for each in range(_c.device_count()):
            _c.seed(each, seed)

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        with _generators:
            state: torch.Tensor = _c.default_generator(_index(device)).get_state()
        return state

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        with _generators:
            _c.default_generator(_index(device)).set_state(state)


torch._register_device_module("sim", _DeviceModule("torch.sim"))  # type: ignore[no-untyped-call]  # untyped in torch
generate_methods_for_privateuse1_backend(for_storage=True)


def _native_dropout(given: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout by the device's generator: the CPU's kernel takes no other than the CPU's own.

    It draws in the order of memory where the tensor has no gaps, else in the order of its shape.
    """
    if train is False:
        return given.clone(), torch.ones_like(given, dtype=torch.bool)
    kept = torch.empty_like(given)
    if kept.stride() == given.stride():
        kept.bernoulli_(1 - p)
    else:
        kept.copy_(given.new_empty(given.shape).bernoulli_(1 - p))
    return given * kept * (0.0 if p == 1 else 1 / (1 - p)), kept.bool()


_library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # untyped in torch
_library.impl("native_dropout", _native_dropout, "PrivateUse1")


@atexit.register
def _finish() -> None:
    if not _c.in_bad_fork():
        for each in range(_c.device_count()):
            with contextlib.suppress(RuntimeError):
                torch.accelerator.synchronize(each)

"""The module ``torch.spmd``, which PyTorch uses for the device."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from spmd.engine.driver.current import engine, is_running
from spmd.engine.driver.logical_tensor import LogicalTensor, uploaded, wrap

__all__ = ["DeviceModule"]


class _Stream:
    """The device's one stream: everything is in order, and no wait is needed."""

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


class DeviceModule:
    """The functions of a device's module, like those of ``torch.cuda``."""

    _stream = _Stream()

    _initialized = True  # activation checkpointing reads it

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        pass

    def device(self, device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: Any = None) -> None:
        pass

    def current_stream(self, device: Any = None) -> _Stream:
        return self._stream

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None:
        if is_running():
            engine().recorder.seed(int(seed))

    manual_seed = manual_seed_all

    def get_rng_state(self, device: Any = None) -> Tensor:
        return wrap(engine().recorder.random_state())

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        if not isinstance(state, LogicalTensor):
            state = uploaded(state.clone())
        engine().recorder.set_random_state(state._alias)

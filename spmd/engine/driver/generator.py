"""``torch.Generator(device="spmd")``: a separate source of random numbers on the device.

Workers draw from a generator that is the same on all. To draw from another one, the common one is put into
that one's state, and restored afterwards; both states are values of the program.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, Self

import torch
from torch import Tensor

from spmd.engine.driver.aliases import Alias
from spmd.engine.driver.current import DEVICE, engine
from spmd.engine.driver.logical_tensor import fetched, uploaded
from spmd.engine.driver.saved import NAMES
from spmd.torch_internals import BaseGenerator

__all__ = ["DeviceGenerator", "draw", "install", "of_device"]

_Meta: Any = type(BaseGenerator)
_known: Final[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()
"""The device's existing generators, by the address of their C++ object."""


class DeviceGenerator(BaseGenerator):  # type: ignore[misc]
    """Like ``torch.Generator``, for the argument ``generator=`` of operations on the device."""

    _state: Alias | None = None
    """The state, once it has been used; until then the state is that of the CPU generator that this object
    is, too.
    """

    def __new__(cls) -> Self:
        made: Self = super().__new__(cls, "cpu")
        _known[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        """The logical device."""
        return DEVICE

    def manual_seed(self, seed: int) -> DeviceGenerator:
        """Seed it; the numbers are those of a CPU generator with this seed."""
        super().manual_seed(seed)
        self._state = None
        return self

    def seed(self) -> int:
        """Seed it with a random number, which is returned."""
        seed: int = super().seed()
        self._state = None
        return seed

    def get_state(self) -> Tensor:
        """Return the state, on the CPU; waits for the workers."""
        state: Tensor = super().get_state() if self._state is None else fetched(self._state)
        return state

    def set_state(self, state: Tensor) -> DeviceGenerator:
        """Set the state."""
        super().set_state(state.cpu())
        self._state = None
        return self

    def clone_state(self) -> DeviceGenerator:
        """Return another one in the same state."""
        return DeviceGenerator().set_state(self.get_state())


def of_device(generator: Any) -> DeviceGenerator | None:
    """Return the device's generator that this is: in C++ it may have got another Python object."""
    return None if generator is None else _known.get(generator._cdata)


def draw(generator: DeviceGenerator, operation: Callable[[], Any]) -> Any:
    """Record an operation that draws from a generator instead of the common one."""
    recorder = engine().recorder
    with recorder.lock:
        common = recorder.random_state()
        if generator._state is None:
            generator._state = uploaded(generator.get_state())._alias
        recorder.set_random_state(generator._state)
        try:
            return operation()
        finally:
            generator._state = recorder.random_state()
            recorder.set_random_state(common)


class _AnyGenerator(_Meta):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:  # noqa: N805  a metaclass, which ruff cannot see
        return isinstance(instance, BaseGenerator)


class Generator(BaseGenerator, metaclass=_AnyGenerator):  # type: ignore[misc]
    """``torch.Generator``, extended to the logical device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
        return DeviceGenerator() if kind in NAMES else BaseGenerator(device)


def install() -> None:
    """Extend ``torch.Generator`` to the logical device."""
    torch.Generator = Generator  # type: ignore[misc]

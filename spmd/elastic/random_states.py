"""The states of the random number generators of this process: Python's, PyTorch's, and NumPy's global one."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any, Final

import torch

__all__ = ["RandomStates"]

_MT19937_BYTES: Final = 624 * 4 + 4
"""Size of the words and the position of NumPy's usual generator, in memory."""


class RandomStates:
    """Random number generators that are put back when an attempt is repeated. For the training thread."""

    def __init__(self) -> None:
        self._python: Any = None
        self._torch: torch.Tensor | None = None
        self._cuda: list[torch.Tensor] | None = None
        self._numpy: Any = None
        self._numpy_memory = b""

    def keep(self) -> None:
        """Copy the states."""
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if _uses_cuda() else None
        if (numpy := sys.modules.get("numpy.random")) is not None:  # NumPy imports it when it is first used
            # NumPy converts word by word, which takes longer than all else that an attempt begins with.
            # A number that is drawn already is not in that memory.
            memory = _memory(numpy)
            if not memory or memory != self._numpy_memory or self._numpy["has_gauss"]:
                self._numpy, self._numpy_memory = numpy.get_state(legacy=False), memory

    def put_back(self) -> None:
        """Set the states that ``keep`` has copied."""
        assert self._torch is not None
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


def _memory(numpy: Any) -> bytes:
    """Return the state of NumPy's generator as it is in memory, to be compared; nothing if it is unknown."""
    generator = numpy.get_bit_generator()
    if type(generator) is not numpy.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

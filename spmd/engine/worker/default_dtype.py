"""PyTorch's default dtype, which is the process's, while programs of several ranks run in it."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Final

import torch

__all__ = ["DefaultDtype"]

_changed: Final = threading.Condition()

_programs = 0
"""Number of programs that run, all with the same default dtype."""

_before = torch.float32
"""The default dtype that the process had before these."""


class DefaultDtype:
    """A context with another default dtype. Entering it waits for programs that run with a third one: these
    need no program that begins later, as all ranks run the same programs in the same order.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __enter__(self) -> None:
        global _programs, _before
        with _changed:
            _changed.wait_for(lambda: not _programs or torch.get_default_dtype() == self._dtype)
            if not _programs:
                _before = torch.get_default_dtype()
                torch.set_default_dtype(self._dtype)
            _programs += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _programs
        with _changed:
            _programs -= 1
            if not _programs:
                torch.set_default_dtype(_before)
                _changed.notify_all()

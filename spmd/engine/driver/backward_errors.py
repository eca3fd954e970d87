"""Errors while gradients are computed: of operations that cannot be recorded, and of users' hooks.

Such an error is still Python's pending one when PyTorch's engine frees what a node of the graph has used. The
engine then asks for the device's type, in Python; if that raised an error, the process would end. So the
pending error is removed there, and ``backward()`` raises it.
"""

from __future__ import annotations

from collections import deque
from operator import itemgetter
from typing import Any, Final

from torch.autograd import Variable

from spmd.torch_internals import BaseDeviceGuard, DeviceType, backward_engine

__all__ = ["DeviceGuard", "raise_what_was_taken"]

_taken: Final[deque[BaseException]] = deque()
_TYPES: Final = (DeviceType.PrivateUse1,)
_first: Final[Any] = itemgetter(0)


class DeviceGuard(BaseDeviceGuard):  # type: ignore[misc]  # written in C++
    """Answers PyTorch's queries about the device."""

    @staticmethod
    def type_() -> Any:
        """Return the type of the device. A call of C code fails if an error is pending, with that as its
        cause.
        """
        try:
            return _first(_TYPES)
        except SystemError as error:
            _taken.append(error.__cause__ or error)
            return _TYPES[0]


class _Engine(type(backward_engine)):  # type: ignore[misc]
    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError:  # it has failed, because an error is pending
            if not _taken:
                raise
            error = _taken.popleft()
        raise error


def raise_what_was_taken() -> None:
    """Make ``backward()`` and ``autograd.grad()`` raise the errors that were removed.

    If two of them fail at once, on two threads, each may raise the other's error.
    """
    Variable._execution_engine = _Engine()

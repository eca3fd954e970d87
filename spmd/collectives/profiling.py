"""What a group does, as PyTorch's profiler shows it: one event for each operation, ``farcall:all_reduce``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

__all__ = ["PREFIX", "begin"]

PREFIX = "farcall:"

_functions: Any = torch._C._autograd


def begin(operation: str, tensors: Sequence[torch.Tensor]) -> Callable[[], object] | None:
    """Begin an event, if a profiler records. Returns what ends it, on any thread.

    Args:
        operation: its name, with its arguments or without.
        tensors: their shapes are shown.
    """
    if not _functions._profiler_enabled():
        return None
    event = _functions._record_function_with_args_enter(PREFIX + operation.partition("(")[0], *tensors)
    return partial(_end, event)


def _end(event: Any) -> None:
    # Events that begin and end on one thread are taken to lie within each other; those of operations overlap.
    thread = threading.Thread(target=_functions._record_function_with_args_exit, args=(event,))
    thread.start()
    thread.join()

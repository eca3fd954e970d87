"""What a group does, as PyTorch's profiler shows it: one event for each operation, ``farcall:all_reduce``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from spmd.collectives.torch_internals import begin_event, end_event, is_profiled

__all__ = ["PREFIX", "begin"]

PREFIX = "farcall:"


def begin(operation: str, tensors: Sequence[torch.Tensor]) -> Callable[[], object] | None:
    """Begin an event, if a profiler records. Returns what ends it, on any thread.

    Args:
        operation: its name, with its arguments or without.
        tensors: their shapes are shown.
    """
    if not is_profiled():
        return None
    event = begin_event(PREFIX + operation.partition("(")[0], *tensors)
    return partial(_end, event)


def _end(event: object) -> None:
    # Events that begin and end on one thread are taken to lie within each other; those of operations overlap.
    thread = threading.Thread(target=end_event, args=(event,))
    thread.start()
    thread.join()

"""Operations of groups in PyTorch's profiler: one event for each, such as ``farcall:all_reduce``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from spmd.collectives.torch_internals import begin_event, end_event, is_profiled

__all__ = ["PREFIX", "begin"]

PREFIX = "farcall:"


def begin(operation: str, tensors: Sequence[torch.Tensor]) -> Callable[[], object] | None:
    """Begin an event, if a profiler records. Returns a function that ends it, on any thread.

    Args:
        operation: its name, with or without its arguments.
        tensors: tensors whose shapes are shown.
    """
    if not is_profiled():
        return None
    event = begin_event(PREFIX + operation.partition("(")[0], *tensors)
    return partial(_end, event)


def _end(event: object) -> None:
    # The profiler takes events that begin and end on one thread to be nested, but those of operations
    # overlap.
    thread = threading.Thread(target=end_event, args=(event,))
    try:
        thread.start()
    except RuntimeError:  # the system has no more threads
        end_event(event)
    else:
        thread.join()

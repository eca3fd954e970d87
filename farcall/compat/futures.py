"""``torch.futures.wait_all`` and ``collect_all`` as PyTorch documents them, for farcall's futures.

PyTorch's own give up at the first error only if the error was set from C++; one set from Python looks like a
value to them, so they would wait for all the others first.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import torch.futures

import rpc
from rpc.agent.futures import wait_futures

__all__ = ["collect_all", "wait_all"]

_torch_wait_all: Final = torch.futures.wait_all
_torch_collect_all: Final = torch.futures.collect_all

TorchFuture = torch.futures.Future[Any]


def wait_all(futures: list[TorchFuture]) -> list[Any]:
    """Wait for all futures, or until one fails.

    Args:
        futures: any mixture of farcall's and PyTorch's.

    Returns:
        Their values, in order.

    Raises:
        The error of the first one that fails.
    """
    if any(isinstance(future, rpc.Future) for future in futures):
        return wait_futures(futures)
    return _torch_wait_all(futures)


def collect_all(futures: list[TorchFuture]) -> torch.futures.Future[list[TorchFuture]]:
    """A future of all the futures, completed when all are or when one fails.

    Args:
        futures: any mixture of farcall's and PyTorch's.
    """
    if not any(isinstance(future, rpc.Future) for future in futures):
        return _torch_collect_all(futures)
    collected: rpc.Future[list[TorchFuture]] = rpc.Future()
    lock = threading.Lock()
    left = len(futures)

    def completed(future: TorchFuture) -> None:
        nonlocal left
        error = None
        try:
            future.value()
        except Exception as raised:
            error = raised
        with lock:
            if left <= 0:
                return
            left = left - 1 if error is None else -1
            done = left
        if error is not None:
            collected.set_exception(error)
        elif done == 0:
            collected.set_result(list(futures))

    for future in futures:
        future.add_done_callback(completed)
    return collected

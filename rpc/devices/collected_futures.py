"""Has ``torch.futures.collect_all`` and ``wait_all`` use calls' own futures while messages use devices.

PyTorch copies the futures that they are given. A copy does not know of ``rpc.Future``, so it does not make
streams wait for tensors. The function that both call is replaced while an agent of this process uses devices.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final

import torch

from rpc.agent.futures import Future
from rpc.runtime.torch_internals import collect_all, set_collect_all

__all__ = ["replace_collect_all", "restore_collect_all"]

_lock = threading.RLock()  # a finalizer that runs while it is held may end an agent
_agents: Final[list[object]] = []


def replace_collect_all(agent: object) -> None:
    """Replace the function until ``restore_collect_all`` has been called for the same agent."""
    theirs = collect_all
    if theirs is None:
        return  # this version of PyTorch does not have it, as the log says

    def with_calls_own(futures: list[torch.futures.Future[Any]]) -> torch.futures.Future[Any]:
        return Future.of_several(futures, theirs(futures))

    with _lock:
        _agents.append(agent)
        set_collect_all(with_calls_own)


def restore_collect_all(agent: object) -> None:
    """Restore PyTorch's function, unless another agent uses devices."""
    with _lock:
        if agent in _agents:
            _agents.remove(agent)
        if collect_all is not None and not _agents:
            set_collect_all(collect_all)


def _restore_in_child() -> None:
    """Restore PyTorch's function in a forked child, which has none of its parent's agents."""
    global _lock
    _lock = threading.RLock()
    _agents.clear()
    if collect_all is not None:
        set_collect_all(collect_all)


os.register_at_fork(after_in_child=_restore_in_child)

"""Has ``torch.futures.collect_all`` and ``wait_all`` use calls' own futures.

PyTorch's function copies the futures that it is given. A copy does not know of ``rpc.Future``, and does not
wait for the work on its value. And it takes an error that was set from Python for a value, so it waits for
all the others before it fails. The function that both call is replaced while this process has an agent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any, Final

import torch

from rpc.agent.futures import Future
from rpc.runtime.torch_internals import collect_all, set_collect_all

__all__ = ["replace_collect_all", "restore_collect_all"]

_lock = threading.RLock()  # a finalizer that runs while it is held may end an agent
_users: Final[list[object]] = []


def replace_collect_all(user: object) -> None:
    """Replace the function until ``restore_collect_all`` has been called for the same user, as an agent."""
    theirs = collect_all
    if theirs is None:
        return  # this version of PyTorch does not have it, as the log says

    def with_calls_own(futures: Iterable[torch.futures.Future[Any]]) -> torch.futures.Future[Any]:
        given = list(futures)  # an iterator can be read once only
        is_call = any(isinstance(each, Future) for each in given)
        return Future.of_several(given) if is_call else theirs(given)

    with _lock:
        _users.append(user)
        set_collect_all(with_calls_own)


def restore_collect_all(user: object) -> None:
    """Restore PyTorch's function, unless there are other users."""
    with _lock:
        if user in _users:
            _users.remove(user)
        if collect_all is not None and not _users:
            set_collect_all(collect_all)


def _restore_in_child() -> None:
    """Restore PyTorch's function in a forked child, which has none of its parent's agents."""
    global _lock
    _lock = threading.RLock()
    _users.clear()
    if collect_all is not None:
        set_collect_all(collect_all)


os.register_at_fork(after_in_child=_restore_in_child)

"""Positions in the user's program: the innermost frame outside of PyTorch and of this distribution."""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType
from typing import Any, Final

import torch

from dist_autograd.torch_internals import current_task
from rpc.runtime.code_folders import OURS
from rpc.runtime.collection_pause import paused
from spmd.engine.driver.bounded_cache import BoundedCache

__all__ = ["Position", "current_position", "described"]

Position = tuple[CodeType | None, int]
"""A code object, and an offset in it; nothing is looked up until it is needed."""

_OURS: Final = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, *OURS, "<frozen")
_is_users: Final[BoundedCache[str, bool]] = BoundedCache(1 << 14)
"""By file; not by code object, whose hash is computed from all its instructions each time."""
_backward: list[Any] = [None, (None, 0)]


def current_position() -> Position:
    """Return the calling thread's position; on a thread of PyTorch's engine, that of the call of
    ``backward``.
    """
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        is_users = _is_users[file]
        if is_users is None:
            is_users = _is_users[file] = not file.startswith(_OURS)
        if is_users:
            return code, frame.f_lasti
        frame = frame.f_back
    return _of_backward()


def _of_backward() -> Position:
    """Where the main thread waits, looked up once for each backward."""
    task = current_task()
    if _backward[0] != task or task == -1:
        with paused():
            frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
            while frame is not None and frame.f_code.co_filename.startswith(_OURS):
                frame = frame.f_back
            _backward[1] = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
        _backward[0] = task
    found: Position = _backward[1]
    return found


def described(where: Position) -> str:
    """``path:line in function``."""
    code, offset = where
    if code is None:
        return "unknown position"
    line = code.co_firstlineno
    for begin, end, number in code.co_lines():
        if begin <= offset < end and number is not None:
            line = number
    return f"{code.co_filename}:{line} in {code.co_name}"

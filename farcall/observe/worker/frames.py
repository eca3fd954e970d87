"""What a thread does, as another thread sees it by its frames: the line of user code that it is at, and what
it waits for.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final

from rpc.runtime.code_folders import INSTALLED, OURS, is_users
from rpc.runtime.collection_pause import is_needed, paused

__all__ = [
    "collection_paused",
    "copies_kept",
    "coroutine_frames",
    "frames_of_others",
    "refresh_variables",
    "users_frame",
    "variables_of",
    "waits_for",
    "waits_in",
]

_BY_METHOD: Final = {
    "Event.wait": "waits for an Event",
    "Condition.wait": "waits for a Condition",
    "Condition.wait_for": "waits for a Condition",
    "Semaphore.acquire": "waits for a semaphore",
    "Barrier.wait": "waits for a threading.Barrier",
    "Thread.join": "waits for a thread to end",
}
"""Methods of ``threading``, by their qualified names."""

_PYTORCHS_RPC: Final = "/torch/distributed/rpc/"
_OF_PYTORCHS_RPC: Final = (
    "waits in torch.distributed.rpc, which is not farcall's: import farcall.rpc, or launch with --lend-names"
)

_BY_FILE: Final = {
    "threading.py": "waits for a lock",
    "queue.py": "waits for a queue",
    "socket.py": "waits for a socket",
    "ssl.py": "waits for a socket",
    "selectors.py": "waits for a socket or pipe",
    "subprocess.py": "waits for a subprocess",
    "connection.py": "waits for a pipe",
}
"""Files of the standard library."""

_BY_CALL: Final = {
    "sleep": "sleeps",
    "acquire": "waits for a lock",
    "recv": "waits for a socket",
    "recv_into": "waits for a socket",
    "recvfrom": "waits for a socket",
    "accept": "waits for a socket",
    "connect": "waits for a socket",
    "sendall": "waits for a socket",
    "select": "waits for a socket or pipe",
    "poll": "waits for a socket or pipe",
    "waitpid": "waits for a subprocess",
    "open": "waits for a file",
    "read": "waits for a file or pipe",
    "readline": "waits for a file or pipe",
    "write": "waits for a file or pipe",
    "input": "waits for input",
}
"""Functions written in C, which have no frame, by the name under which they are called."""

_WITH: Final = "waits to enter a with block, for a lock most likely"

_NAMES: Final = frozenset(
    ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF", "LOAD_FAST_BORROW")
)


class _Copies:
    """Copies of variables that frames have made as they were read; the copy lives as long
    as the frame.

    When a frame is read again, CPython replaces the values in its copy, one by one. If the copy has the last
    reference to one, a destructor runs in the middle of that, in which the other thread can leave the frame,
    whose memory is then used by others. So the copies are kept, and what is replaced in them is released at
    the end of :func:`collection_paused`.
    """

    def __init__(self) -> None:
        self.are_kept = False
        self.of_frames: dict[int, tuple[CodeType, Mapping[str, Any]]] = {}
        """The code of a frame, and its copy, by the frame's identity."""
        self.replaced: list[object] = []


_copies = _Copies()


def _forked() -> None:
    """The threads whose frames were read do not exist in a forked child."""
    global _copies
    _copies = _Copies()


os.register_at_fork(after_in_child=_forked)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collection of garbage, and release what copies of variables have lost, when it goes on."""
    released: list[object] = []
    with paused() as is_outermost:
        try:
            yield
        finally:
            if is_outermost:
                released += _copies.replaced
                _copies.replaced.clear()


def frames_of_others() -> dict[int, FrameType]:
    """Innermost frames of all other threads, by thread. They are read within :func:`collection_paused`."""
    with collection_paused():
        frames = sys._current_frames()
    # Otherwise this frame would keep itself and its callers alive until garbage is collected.
    del frames[threading.get_ident()]
    return frames


def variables_of(frame: FrameType) -> Mapping[str, Any]:
    """Return the local variables of a frame, which is read within :func:`collection_paused`."""
    if not is_needed:
        return frame.f_locals
    known = _copies.of_frames.pop(id(frame), None)
    if known is not None:
        _copies.replaced.append((known, tuple(known[1].values())))
    variables = frame.f_locals
    if _copies.are_kept:
        _copies.of_frames[id(frame)] = frame.f_code, variables
    return variables


def refresh_variables(innermost: Iterable[FrameType]) -> None:
    """Have copies of variables lose what their frames have deleted or replaced since, given the innermost
    frames of all other threads. Within :func:`collection_paused`, at whose end it is released.
    """
    copies = _copies.of_frames
    if not copies:
        return
    found = set()
    for outward in innermost:
        frame: FrameType | None = outward
        while frame is not None:
            known = copies.get(id(frame))
            if known is not None and known[0] is frame.f_code:
                found.add(id(frame))
                variables_of(frame)
            frame = frame.f_back
    for each in copies.keys() - found:
        _copies.replaced.append(copies.pop(each))


@contextmanager
def copies_kept() -> Iterator[None]:
    """While :func:`refresh_variables` is called now and then, copies of variables are kept in between."""
    _copies.are_kept = True
    try:
        yield
    finally:
        with collection_paused():
            _copies.are_kept = False
            _copies.replaced += _copies.of_frames.values()
            _copies.of_frames.clear()


def users_frame(frame: FrameType | None, end: FrameType | None = None) -> FrameType | None:
    """Return the innermost frame of the user's own code, before the frame ``end``; if there is none, that of
    an installed package; else None.
    """
    installed: FrameType | None = None
    while frame is not None and frame is not end:
        file = frame.f_code.co_filename
        if is_users(file):
            if not file.startswith(INSTALLED):
                return frame
            installed = installed or frame
        frame = frame.f_back
    return installed


def waits_for(frame: FrameType | None, end: FrameType | None = None) -> str:
    """Return what a thread that does not compute waits for, given its innermost frame; "" if that is unknown,
    for example if no user code is between that frame and the frame ``end``.
    """
    called: CodeType | None = None
    while frame is not None and frame is not end:
        if is_users(frame.f_code.co_filename):
            if _is_in_pytorchs_rpc(frame):
                return _OF_PYTORCHS_RPC
            return _of_frame(called) if called is not None else _of_call(frame)
        called = frame.f_code
        frame = frame.f_back
    return ""


def _is_in_pytorchs_rpc(innermost: FrameType) -> bool:
    """Whether the installed package that a frame belongs to is waiting in PyTorch's own RPC."""
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code.co_filename.startswith(INSTALLED):
        if _PYTORCHS_RPC in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def waits_in(name: str) -> str:
    """Like ``waits_for``, for a function in C with this name; "" if it is not known to wait."""
    return _BY_CALL.get(name, "")


def _of_frame(called: CodeType) -> str:
    """Like ``waits_for``, for the function that the user's code has called."""
    by_method = _BY_METHOD.get(called.co_qualname.removeprefix("Bounded"))
    file = os.path.basename(called.co_filename)
    known = by_method or _BY_FILE.get(file)
    if known is None and called.co_filename.startswith(OURS):
        return f"is in {called.co_name}()"
    return known or f"is in {called.co_qualname} of {file}"


def _of_call(frame: FrameType) -> str:
    """Like ``waits_for``, for the function in C that a frame is calling."""
    name = _called_name(frame.f_code, frame.f_lasti)
    if name is None:
        return ""
    return name if name == _WITH else _BY_CALL.get(name, f"is in a call of {name}")


@functools.lru_cache(maxsize=256)
def _called_name(code: CodeType, at: int) -> str | None:
    """The last part of the name that is called by the instruction at an offset.

    A function is disassembled from its start, which takes milliseconds for one of thousands of instructions.
    """
    before: list[dis.Instruction] = []
    for instruction in dis.get_instructions(code):
        if instruction.offset >= at:
            break
        before.append(instruction)
    else:
        return None
    if instruction.opname == "BEFORE_WITH" or any(each.opname == "LOAD_SPECIAL" for each in before[-3:]):
        return _WITH
    call = instruction.positions
    if not instruction.opname.startswith("CALL") or call is None or call.col_offset is None:
        return None
    start, end = (call.lineno or 0, call.col_offset), (call.end_lineno or 0, call.end_col_offset or 0)
    found: tuple[tuple[int, int], str] | None = None
    for each in before:
        where = each.positions
        if where is None or each.opname not in _NAMES or not isinstance(each.argval, str):
            continue
        ends = (where.end_lineno or 0, where.end_col_offset or 0)
        if (where.lineno, where.col_offset) == start and ends < end and (found is None or ends > found[0]):
            found = ends, each.argval
    return None if found is None else found[1]


def coroutine_frames(coroutine: Any) -> list[FrameType]:
    """Return the frames of a suspended coroutine and of what it awaits, from the outermost."""
    frames: list[FrameType] = []
    with collection_paused():
        while coroutine is not None and len(frames) < 1000:
            frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
            if frame is None:
                break
            frames.append(frame)
            coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return frames

"""Tracebacks for users: the program's own frames, without those of this distribution.

Frames of this distribution, of the modules with which it waits, and of ``runpy`` are left out. A cause that
has no other frames is left out too if the text of the error that it caused contains its text; otherwise it is
shown without frames. An error without any frame of the program keeps all frames, since the fault may be ours.
With ``FARCALL_TRACEBACKS=full`` in the environment nothing is left out.
"""

from __future__ import annotations

import os
import traceback
from typing import Final

from rpc.errors import RpcError
from rpc.runtime.stacks import LIBRARIES, OURS

__all__ = ["folded", "in_one_line", "place_of"]

_LEFT_OUT: Final = (*OURS, "<frozen runpy>", "<frozen importlib")
_STANDARD: Final = os.path.join(os.path.dirname(os.__file__), "")
_WAITING: Final = tuple(
    _STANDARD + name for name in ("asyncio/", "concurrent/", "contextlib.py", "queue.py", "threading.py")
)
"""Modules of the standard library whose frames are left out if ours call them."""


def folded(error: BaseException, *, for_caller: bool = False) -> str:
    """Return the traceback of an error, as ``traceback.format_exception`` does, without our own frames.

    Args:
        error: the error.
        for_caller: whether it is for the caller of a function that has raised, which also gets the error and
        its notes: then notes are left out, and so are all frames of an error of ours if there are no others.
    """
    described = traceback.TracebackException.from_exception(error)
    if for_caller:
        described.__notes__ = None
    if os.environ.get("FARCALL_TRACEBACKS") != "full":
        is_complete = for_caller and isinstance(error, RpcError)
        if is_complete and described.stack and not _users(described.stack):
            return str(described)
        _fold(described)
    return "".join(described.format())


def in_one_line(error: BaseException) -> str:
    """Return an error and the innermost line of the program that it was raised through, as one line."""
    text = " ".join(str(traceback.TracebackException.from_exception(error)).split())
    return f"{type(error).__name__}{place_of(error)}{text and ': '}{text}"


def place_of(error: BaseException) -> str:
    """Return `` at FILE:LINE``, the innermost of the program's lines that an error was raised through; "" if
    there is none.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not (file := frame.f_code.co_filename).startswith((*LIBRARIES, "<")):
            return f" at {file}:{line}"
    return ""


def _fold(described: traceback.TracebackException) -> None:
    described.stack[:] = _users(described.stack) or described.stack
    for member in described.exceptions or ():
        _fold(member)
    text = str(described)
    while (cause := described.__cause__ or _context(described)) is not None:
        users = _users(cause.stack)
        if not users and (cause.stack or str(cause)) and str(cause) in text:
            described.__cause__, described.__context__ = cause.__cause__, cause.__context__
            described.__suppress_context__ = cause.__suppress_context__
            continue
        cause.stack[:] = users
        if not users:
            cause.stack = None  # type: ignore[assignment]  # and so no headline either
        for member in cause.exceptions or ():
            _fold(member)
        described = cause


def _users(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames that are not ours, nor of a module with which ours wait."""
    users = []
    is_ours = False
    for frame in stack:
        is_ours = frame.filename.startswith((*_LEFT_OUT, *_WAITING) if is_ours else _LEFT_OUT)
        if not is_ours:
            users.append(frame)
    return users


def _context(described: traceback.TracebackException) -> traceback.TracebackException | None:
    return None if described.__suppress_context__ else described.__context__

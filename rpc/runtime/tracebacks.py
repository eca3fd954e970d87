"""Tracebacks for users: the program's own frames, without those of this distribution.

Frames of this distribution, of the modules with which it waits, and of ``runpy`` are left out. A cause that
has no other frames is left out too if the text of the error that it caused contains its text; otherwise it is
shown without frames. An error without any frame of the program keeps all frames, since the fault may be ours.
An error of a pool's process is shown once, with the frames of both processes. Of another worker's traceback
without frames of the program, only the worker's name is left. If a note, as of another worker's traceback,
ends with the error's text, it is cut there. With ``FARCALL_TRACEBACKS=full`` in the environment nothing is
left out.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from types import TracebackType
from typing import Final

from rpc.errors import RpcError
from rpc.runtime.code_folders import INSTALLED, LIBRARIES, OURS
from rpc.runtime.legible import legible

__all__ = ["fold_uncaught", "folded", "in_one_line", "place_of", "show_as", "shows_all"]

_LEFT_OUT: Final = (*OURS, "<frozen runpy>", "<frozen importlib")
_STANDARD: Final = os.path.join(os.path.dirname(os.__file__), "")
_WAITING: Final = tuple(
    _STANDARD + name for name in ("asyncio/", "concurrent/", "contextlib.py", "queue.py", "threading.py")
) + tuple(os.path.join(folder, "torch", "futures", "") for folder in INSTALLED)
"""Modules of others whose frames are left out if ours call them."""

_POOLS: Final = tuple(_STANDARD + name for name in ("concurrent/", "multiprocessing/"))
_OF_POOLS: Final = {
    ("multiprocessing.pool", "RemoteTraceback"),
    ("concurrent.futures.process", "_RemoteTraceback"),
}
"""Causes by which pools of processes show the traceback of the other process, as text."""

_SHOWN_AGAIN: Final = 60
"""Number of characters of an error's text that are shown once more."""

_OF_WORKER: Final = re.compile(r"\n?Traceback on (worker '.*'):\n")
"""The beginning of a note that has the traceback of another worker."""

_FRAME: Final = re.compile(r'^  File "(.*)", line \d+, in .*\n(?:    .*\n)*', re.MULTILINE)


def fold_uncaught() -> None:
    """Have uncaught errors of this process printed without our own frames, unless it has a hook for them."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print


def show_as(error: BaseException, text: str) -> None:
    """Have an uncaught error of this process printed as this text, in one piece, unless the program has a
    hook that prints it. PyTorch's hook, which begins each line with the rank, prints the text.
    """
    fold_uncaught()
    _texts[id(error)] = text


_texts: Final[dict[int, str]] = {}


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    shown = _texts.pop(id(error), None)
    text = shown or folded(error)
    if sys.stderr is None or (shown is None and text == "".join(traceback.format_exception(error))):
        sys.__excepthook__(kind, error, trace)  # nothing is left out
    else:
        sys.stderr.write(text)


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
    if not shows_all():
        is_complete = for_caller and isinstance(error, RpcError)
        if is_complete and described.stack and not _users(described.stack):
            return str(described)
        _fold(described)
        _fold_pool(described, error)
        _fold_workers(described)
        _shorten_repetition(described)
    return "".join(described.format())


def shows_all() -> bool:
    """Whether ``FARCALL_TRACEBACKS`` asks for all frames."""
    return os.environ.get("FARCALL_TRACEBACKS") == "full"


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
            return f" at {legible(file)}:{line}"
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


def _fold_pool(described: traceback.TracebackException, error: BaseException) -> None:
    """Show the program's frames in a pool's process once, if that raised the error out of ours."""
    cause = error.__cause__
    if (type(cause).__module__, type(cause).__name__) not in _OF_POOLS:
        return
    frames = [(each[1], each[0]) for each in _FRAME.finditer(str(cause))]
    if not any(file.startswith(_LEFT_OUT) for file, _ in frames):
        return
    described.__cause__ = described.__context__ = None
    while len(described.stack) > 1 and described.stack[-1].filename.startswith(_POOLS):
        described.stack.pop()
    users = "".join(text for file, text in frames if not file.startswith((*_LEFT_OUT, *_POOLS)))
    described.__notes__ = [
        *(described.__notes__ or ()),
        f"Raised in a process of the pool:\n{users}".rstrip(),
    ]


def _fold_workers(described: traceback.TracebackException) -> None:
    """Leave out of tracebacks of other workers what has no frames of the program, if this one has any."""
    notes: object = described.__notes__  # the program may have set anything
    if not isinstance(notes, list) or not _users(described.stack):
        return
    described.__notes__ = [
        f"Raised on {begin[1]}"
        if isinstance(each, str)
        and (begin := _OF_WORKER.match(each))
        and (files := _FRAME.findall(each))
        and all(file.startswith((*_LEFT_OUT, *_WAITING)) for file in files)
        else each
        for each in notes
    ]


def _shorten_repetition(described: traceback.TracebackException) -> None:
    """Cut the text of an error at the end of its notes, where it is long."""
    text = str(described)
    notes: object = described.__notes__  # the program may have set anything
    if len(text) <= _SHOWN_AGAIN or not isinstance(notes, list):
        return
    described.__notes__ = [
        f"{each.rstrip().removesuffix(text)}{text[:_SHOWN_AGAIN].rstrip()} ..."
        if isinstance(each, str) and each.rstrip().endswith(text)
        else each
        for each in notes
    ]


def _users(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames that are not ours, nor of a module with which ours wait."""
    users: list[traceback.FrameSummary] = []
    is_ours = False
    for frame in stack:
        was_ours, is_ours = (
            is_ours,
            frame.filename.startswith((*_LEFT_OUT, *_WAITING) if is_ours else _LEFT_OUT),
        )
        if (
            is_ours
            and not was_ours
            and users
            and (users[-1].filename, users[-1].name) == ("<string>", "__init__")
        ):
            users.pop()  # of a data class of ours
        if not is_ours:
            users.append(frame)
    return users


def _context(described: traceback.TracebackException) -> traceback.TracebackException | None:
    return None if described.__suppress_context__ else described.__context__

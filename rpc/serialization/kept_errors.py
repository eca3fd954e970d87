"""Errors that a future or an object keeps.

The traceback of an error refers to frames, and these to their callers. They would keep what is there:
arguments, a message's buffers, and often the future itself, which is a cycle that the garbage collector
cannot see, since it cannot inspect PyTorch's futures. So an error that is kept has no traceback, and neither
have its causes, contexts and members. The places outside of farcall's code stay as text, in notes.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Final, TypeVar

__all__ = ["noted", "without_frames"]

E = TypeVar("E", bound=BaseException)

Copy = Callable[[BaseException], BaseException]

_OWN_PACKAGES: Final = ("rpc.", "rref.")


def without_frames(error: E, *, copy: Copy | None = None) -> E:
    """Remove the tracebacks of an error, and those of its causes, contexts and members, whose places become
    notes.

    Args:
        error: the error.
        copy: copies a cause or context that a caller is handling meanwhile, which must keep its traceback:
            the error refers to the copy from then on, which has notes, and no causes. By default, it stays
            as it is.
    """
    running = set(_callers(sys._getframe(1)))  # not of this frame, which would be a cycle
    waiting: list[BaseException] = [error]
    seen = {id(error)}
    error.__traceback__ = None
    while waiting:
        parent = waiting.pop()
        linked = [(name, getattr(parent, name)) for name in ("__cause__", "__context__")]
        if isinstance(parent, BaseExceptionGroup):
            linked += [("", member) for member in parent.exceptions]
        for name, each in linked:
            if each is None or id(each) in seen:
                continue
            places = each.__traceback__
            if places is not None and places.tb_frame in running:
                if copy is not None and name:
                    setattr(parent, name, _alone(each, copy))
                continue
            seen.add(id(each))
            _note_places(each, places)
            each.__traceback__ = None
            waiting.append(each)
    return error


def _alone(error: BaseException, copy: Copy) -> BaseException | None:
    """Return a copy of an error that refers to no other one and has notes; None if there can be none."""
    copied = copy(error)
    if copied is error or isinstance(copied, BaseExceptionGroup):
        return None
    copied.__cause__ = copied.__context__ = copied.__traceback__ = None
    _note_places(copied, error.__traceback__)
    return copied


def noted(error: E, *, copy: Copy | None = None) -> E:
    """Remove the tracebacks as ``without_frames`` does; the place of the error itself becomes a note, too."""
    _note_places(error, error.__traceback__)
    return without_frames(error, copy=copy)


def _note_places(error: BaseException, places: TracebackType | None) -> None:
    while places is not None and places.tb_frame.f_globals.get("__name__", "").startswith(_OWN_PACKAGES):
        places = places.tb_next
    if places is not None:
        error.add_note(f"Raised at:\n{''.join(traceback.format_tb(places)).rstrip()}")


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back

"""What another thread does while this one is not running, at a moment that a test chooses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

__all__ = ["meanwhile"]


def meanwhile(
    line: int, happens: Callable[[], object], function: Callable[[], object], module: ModuleType
) -> bool:
    """Run a function, and another right before the so many-th line of a module that the first one runs.

    Args:
        line: counted from 1.
        happens: what is run in between. It is on this thread, too, so no lock that is held there stops it.
        function: is run on this thread.
        module: whose lines count.

    Returns:
        Whether it runs so many.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            count += 1
            if count == line:
                happens()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count >= line

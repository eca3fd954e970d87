"""A thread's way through a piece of code, instruction by instruction."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, Self


class Step:
    """Does something right before one of the instructions of certain files: the ``number``-th that runs here.

    Args:
        number: from 1; 0 for none.
        action: what it does.
        files: whose instructions count.

    Attributes:
        taken: whether so many ran.
    """

    def __init__(self, number: int, action: Callable[[], object], *, files: Collection[str | None]) -> None:
        self.number = number
        self.action = action
        self.taken = False
        self._files = files
        self._count = 0

    def __enter__(self) -> Self:
        sys._getframe().f_trace_opcodes = True  # Python 3.12 reports instructions only if this was set before
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, called: FrameType, event: str, argument: object) -> Any:
        if called.f_code.co_filename not in self._files:
            return None
        called.f_trace_opcodes = True
        return self._trace

    def _trace(self, traced: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and not self.taken:
            self._count += 1
            if self._count == self.number:
                self.taken = True
                self.action()
        return self._trace

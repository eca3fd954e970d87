"""Coroutines each of whose steps is run by a function, as inside modes or on streams."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

__all__ = ["StepwiseCoroutine"]

T = TypeVar("T")


class StepwiseCoroutine(Coroutine[Any, Any, T]):
    """A coroutine whose steps, from one suspension to the next, a function runs: from outside, it looks like
    the coroutine itself, also to what reads its frames.

    Args:
        coroutine: a coroutine.
        step: called as ``step(advance, *args)`` for each step; returns ``advance(*args)``.
    """

    __slots__ = ("_coroutine", "_step")

    def __init__(self, coroutine: Coroutine[Any, Any, T], step: Callable[..., Any]) -> None:
        self._coroutine = coroutine
        self._step = step

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        try:
            return self._step(self._coroutine.throw, *error)
        finally:
            del error  # it refers to this frame, a cycle

    def close(self) -> None:
        self._step(self._coroutine.close)

    def __await__(self) -> Generator[Any, Any, T]:
        return self  # an iterator with ``send``, ``throw`` and ``close``

    def __next__(self) -> Any:
        return self.send(None)

    def __getattr__(self, name: str) -> Any:
        """Forward the attributes that debuggers read: ``cr_frame``, ``cr_await``, ``__qualname__``."""
        return getattr(self._coroutine, name)

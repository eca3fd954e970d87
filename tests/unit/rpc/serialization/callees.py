"""Functions and classes for the tests to send: an importable module, as a user's would be."""

from __future__ import annotations

import enum
import functools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


def null(*args: Any, **kwargs: Any) -> None:
    """Takes anything and returns nothing."""


def add(a: Any, b: Any) -> Any:
    """The sum."""
    return a + b


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that keeps the name."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@logged
def decorated(a: int) -> int:
    """One more."""
    return a + 1


class Plain:
    """An object with attributes and nothing else."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        """The value."""
        return self.value

    @staticmethod
    def triple(value: Any) -> Any:
        """Three times the value."""
        return 3 * value


class Slotted:
    """An object without a ``__dict__``."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Color(enum.Enum):
    """An enumeration."""

    RED = 1
    BLUE = 2


@dataclass
class Point:
    """A dataclass."""

    x: Any
    y: Any = 0
    tags: list[str] = field(default_factory=list)


class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


class Locked:
    """Cannot be pickled."""

    def __init__(self) -> None:
        self.name = "locked"
        self.lock = threading.Lock()


class DropsLock(Locked):
    """Can be pickled all the same."""

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name}


class FailsToLoad:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return fail, ("cannot be rebuilt",)


def fail(text: str) -> None:
    """Raises."""
    raise ValueError(text)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @torch.jit.script
    def scripted(x: torch.Tensor, k: int) -> torch.Tensor:
        """A TorchScript function."""
        return x + k


def trouble(depth: int) -> None:
    """Raises with a traceback of several frames."""
    if depth:
        trouble(depth - 1)
    raise ValueError("trouble")


class Tagged(torch.Tensor):
    """A subclass of Tensor that is no wrapper."""

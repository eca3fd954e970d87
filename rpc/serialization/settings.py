"""The user's settings of serialization: another pickler, and what safe mode admits. Modules may set them when
they are imported, before there is an agent, so they belong to the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from rpc.serialization.portable import ReplacementPickler
from rpc.serialization.safe import AllowList


class Settings:
    """Settings that a serializer reads while it works, so that they may change at any time."""

    def __init__(self) -> None:
        self.allowed = AllowList()  # in safe mode, in addition to what the agent needs
        self.pickler: ReplacementPickler | None = None  # serializes calls in place of ours


process_settings: Final = Settings()


def allow_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Allow a function to be called in safe mode (``deserialization="safe"``), in this process. A decorator.

    Args:
        function: any callable that can be imported by name; ``ValueError`` for anything else, and for a
            class.

    Example::

        @rpc.allow_function
        def score(batch: torch.Tensor) -> torch.Tensor: ...
    """
    process_settings.allowed.function(function)
    return function


def allow_methods(kind: type, *names: str) -> None:
    """Allow methods of objects to be called in safe mode through references, in this process.

    Args:
        kind: class of the objects, or one that it derives from.
        names: names of the methods. No other methods can be called, except, for tensors, those that return a
            copy or tell what kind of tensor it is.

    Example::

        rpc.allow_methods(ParameterServer, "get_weights", "push")
    """
    process_settings.allowed.methods(kind, *names)


def allow_class(kind: type) -> type:
    """Admit a class in safe mode, in this process: its instances, and calls of it. A decorator.

    Args:
        kind: a class that can be imported by name, otherwise ``ValueError``. If it defines ``__setstate__``,
            that must be safe with hostile input.
    """
    process_settings.allowed.cls(kind)
    return kind


@contextlib.contextmanager
def use_pickler(pickler: ReplacementPickler) -> Iterator[None]:
    """Serialize calls with another pickler inside the block, on all threads of this process.

    Args:
        pickler: has ``serialize(obj) -> (bytes, tensors)`` and ``deserialize(bytes, tensors) -> obj``; best
            derived from ``rpc.PortablePickler``. The callee must use it too, unless the default one can read
            its output.

    Example::

        with rpc.use_pickler(MyPickler()):
            rpc.rpc_sync("worker1", evaluate, args=(batch,))
    """
    before, process_settings.pickler = process_settings.pickler, pickler
    try:
        yield
    finally:
        process_settings.pickler = before

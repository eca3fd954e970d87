"""What the user's own modules say about serialization: another pickler, and what safe mode admits. They may
say it when they are imported, before there is an agent, so that it belongs to the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from rpc.serialization.portable import ReplacementPickler
from rpc.serialization.safe import AllowList


class Settings:
    """What a serializer asks for while it works, so that it may change at any time."""

    def __init__(self) -> None:
        self.allowed = AllowList()  # in safe mode, besides what the agent needs
        self.pickler: ReplacementPickler | None = None  # what serializes calls in place of ours


process_settings: Final = Settings()


def allow_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function be called in safe mode (``deserialization="safe"``), in this process. A decorator.

    Args:
        function: whatever can be called and has a name to import it by; ``ValueError`` for anything else,
            and for a class.

    Example::

        @rpc.allow_function
        def score(batch: torch.Tensor) -> torch.Tensor: ...
    """
    process_settings.allowed.function(function)
    return function


def allow_methods(kind: type, *names: str) -> None:
    """Let methods of objects be called in safe mode by those who refer to them, in this process.

    Args:
        kind: the class of the objects, or one that it derives from.
        names: of the methods. Nothing else of them can be called; of tensors also what gives a copy, or tells
            what kind of tensor it is.

    Example::

        rpc.allow_methods(ParameterServer, "get_weights", "push")
    """
    process_settings.allowed.methods(kind, *names)


def allow_class(kind: type) -> type:
    """Admit a class in safe mode, in this process: its instances, and calls of it. A decorator.

    Args:
        kind: has a name to import it by, else ``ValueError``. If it defines ``__setstate__``, that must stand
            hostile input.
    """
    process_settings.allowed.cls(kind)
    return kind


@contextlib.contextmanager
def use_pickler(pickler: ReplacementPickler) -> Iterator[None]:
    """Serialize calls with another pickler inside the block, on all threads of this process.

    Args:
        pickler: has ``serialize(obj) -> (bytes, tensors)`` and ``deserialize(bytes, tensors) -> obj``; best
            derived from ``rpc.PortablePickler``. The callee must use it too, unless it can be read by the
            default one.

    Example::

        with rpc.use_pickler(MyPickler()):
            rpc.rpc_sync("worker1", evaluate, args=(batch,))
    """
    before, process_settings.pickler = process_settings.pickler, pickler
    try:
        yield
    finally:
        process_settings.pickler = before

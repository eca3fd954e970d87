"""Codecs: each is one way to turn calls and values into bytes and back; a message names its codec by number.

A worker answers in the codec that it was asked in. Besides pickle, which every worker has, there can be one
for peers in other languages: see ``Serializer.register_codec``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, Protocol

from torch import Tensor

from rpc.errors import SerializationError
from rpc.serialization.payload import Arrivals, Connect, Destination, Payload, Source

__all__ = ["PICKLE", "Call", "Codec", "Codecs"]

PICKLE: Final = 0
"""The codec of a message that does not say otherwise."""

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, its positional and its keyword arguments."""


class Codec(Protocol):
    """Its methods are called from any thread; arguments and errors are those of ``Serializer``'s methods.

    What cannot be sent or read is a ``SerializationError``.
    """

    id: int
    """Its number in messages, 0 to 255; 0 is pickle."""

    def dump_call(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        to: Destination,
        tracked: list[Tensor] | None,
    ) -> Payload:
        """Serialize a call."""

    def load_call(
        self,
        header: dict[str, Any],
        buffers: Sequence[Any],
        arrivals: Arrivals | None,
        source: Source,
        connect: Connect | None,
    ) -> Call:
        """Rebuild a call."""

    def dump(self, value: Any, to: Destination | None, what: object, tracked: list[Tensor] | None) -> Payload:
        """Serialize a value."""

    def load(
        self,
        header: dict[str, Any],
        buffers: Sequence[Any],
        arrivals: Arrivals | None,
        source: Source,
        connect: Connect | None,
    ) -> Any:
        """Rebuild a value."""


class Codecs(dict[int, Codec]):
    """The codecs of one serializer, by number; one that is missing is a ``SerializationError``."""

    def __missing__(self, number: int) -> NoReturn:
        raise SerializationError(f"a message is in codec {number}, which this worker does not have")

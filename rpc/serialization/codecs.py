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

PICKLE: Final = 0
"""The codec of a message that does not say otherwise."""

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, its positional and its keyword arguments."""


class Codec(Protocol):
    """One way to write and read messages. From any thread."""

    id: int
    """Its number in messages, 0 to 255; 0 is pickle."""

    def dump_call(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        to: Destination,
        *,
        tracked: list[Tensor] | None = None,
    ) -> Payload:
        """Serialize a call.

        Args:
            func: anything that can be called: see ``functions`` for how it travels in pickles.
            args: its positional arguments.
            kwargs: its keyword arguments.
            to: where it goes.
            tracked: a list for those tensors among the arguments that require grad, in an order that the
                receiver finds again; None if nobody wants to know.

        Raises:
            SerializationError: something cannot be sent; names which argument, its type and why. Nothing has
                departed then.
            RpcError: an argument travels beside the payload and refuses, for a reason of its own.
        """

    def load_call(
        self,
        header: dict[str, Any],
        buffers: Sequence[Any],
        arrivals: Arrivals | None,
        source: Source,
        *,
        connect: Connect | None = None,
    ) -> Call:
        """Rebuild a call.

        Args:
            header: the message's header.
            buffers: belong to the receiver now; large tensors are made over their memory.
            arrivals: what ``adopt`` made of the header.
            source: who sent it.
            connect: makes those tensors that the sender put into ``tracked`` part of a graph here, in that
                order; without, they are leaves that require grad.

        Raises:
            FunctionNotFoundError: the function, or a class among the arguments, cannot be imported here.
            SerializationError: it cannot be read, or safe mode does not admit something in it.
        """

    def dumps(
        self,
        value: Any,
        to: Destination | None,
        *,
        what: object = None,
        tracked: list[Tensor] | None = None,
    ) -> Payload:
        """Serialize a value.

        Args:
            value: any object.
            to: where it goes; None if that is not known, and then what ``__main__`` defines goes by value and
                nothing can travel beside the payload.
            what: for error messages: a text that names the object, or the function whose result it is.
            tracked: as for ``dump_call``.

        Raises:
            SerializationError: it cannot be sent; says which part of it, of which type, and why.
            RpcError: a part of it travels beside the payload and refuses, for a reason of its own.
        """

    def loads(
        self,
        header: dict[str, Any],
        buffers: Sequence[Any],
        arrivals: Arrivals | None,
        source: Source,
        *,
        connect: Connect | None = None,
    ) -> Any:
        """Rebuild a value; arguments and errors as for ``load_call``."""


class Codecs(dict[int, Codec]):
    """The codecs of one serializer, by number; one that is missing is a ``SerializationError``."""

    def __missing__(self, number: int) -> NoReturn:
        raise SerializationError(f"a message is in codec {number}, which this worker does not have")

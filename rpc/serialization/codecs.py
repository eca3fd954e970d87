"""Codecs: each is one way to turn calls and values into bytes and back; a message names its codec by number.

A worker answers in the codec that it was asked in. Besides pickle, which every worker has, there can be one
for peers in other languages: see ``Serializer.register_codec``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, Protocol, TypeVar

from rpc.errors import SerializationError
from rpc.serialization.payload import Arrivals, Connect, Destination, Payload, Source, Tracked

PICKLE: Final = 0
"""The codec of a message that does not say otherwise."""

NEUTRAL: Final = 1
"""The codec of messages from and to workers that trust nobody's pickles: see ``neutral``."""

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = tuple[Function, Args, Kwargs]
"""A function, its positional and its keyword arguments."""

T_co = TypeVar("T_co", covariant=True)


class Load(Protocol[T_co]):
    """Rebuilds what another worker sent.

    Args:
        header: the message's header.
        buffers: belong to the receiver now; large tensors are made over their memory.
        arrivals: what ``adopt`` made of the header.
        source: who sent it.
        connect: makes those tensors that the sender put into ``tracked`` part of a graph here, in that
            order; without, they are leaves that require grad.

    Raises:
        FunctionNotFoundError: a function or class that it names cannot be imported here.
        SerializationError: it cannot be read, or safe mode does not admit something in it.
    """

    def __call__(
        self,
        header: dict[str, Any],
        buffers: Sequence[Any],
        arrivals: Arrivals | None,
        source: Source,
        *,
        connect: Connect | None = None,
    ) -> T_co: ...


class Codec(Protocol):
    """One way to write and read messages. From any thread.

    ``dump_call`` and ``dumps`` raise ``SerializationError`` if something cannot be sent, which says which
    part, of which type, and why; and another ``RpcError`` if what travels beside the payload refuses.
    """

    id: int
    """Its number in messages, 0 to 255; 0 is pickle."""

    def dump_call(
        self, func: Function, args: Args, kwargs: Kwargs, to: Destination, *, tracked: Tracked = None
    ) -> Payload:
        """Serialize a call.

        Args:
            func: anything that can be called: see ``functions`` for how it travels in pickles.
            args, kwargs: its arguments.
            to: where it goes.
            tracked: a list for those tensors among the arguments that require grad, in an order that the
                receiver finds again; None if nobody wants to know.
        """

    @property
    def load_call(self) -> Load[Call]:
        """Rebuild a call."""

    def dumps(
        self, value: Any, to: Destination | None, *, what: object = None, tracked: Tracked = None
    ) -> Payload:
        """Serialize a value.

        Args:
            value: any object.
            to: where it goes; None if that is not known, and then what ``__main__`` defines goes by value and
                nothing can travel beside the payload.
            what: for error messages: a text that names the object, or the function whose result it is.
            tracked: as for ``dump_call``.
        """

    @property
    def loads(self) -> Load[Any]:
        """Rebuild a value."""


class Codecs(dict[int, Codec]):
    """The codecs of one serializer, by number; one that is missing is a ``SerializationError``."""

    def __missing__(self, number: int) -> NoReturn:
        raise SerializationError(f"a message is in codec {number}, which this worker does not have")

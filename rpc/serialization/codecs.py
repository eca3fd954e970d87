"""Codecs: ways to serialize calls and values. A message contains the number of its codec.

A worker answers in the codec of the request; failures and late answers are in the codec for the peer.
Besides pickle, which every worker has, there can be one for peers in other languages: see
``Serializer.register_codec``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, Protocol, TypeVar

from rpc.errors import SerializationError
from rpc.serialization.payload import Arrivals, Connect, Destination, Payload, Source, Tracked

PICKLE: Final = 0
"""Codec of a message without a codec number."""

NEUTRAL: Final = 1
"""Codec of messages from and to workers that load no pickles: see ``neutral``."""

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = tuple[Function, Args, Kwargs]
"""A function, its positional and its keyword arguments."""

T_co = TypeVar("T_co", covariant=True)


class Load(Protocol[T_co]):
    """Rebuilds a call or value from another worker.

    Args:
        header: the message's header.
        buffers: the message's buffers, owned by the receiver; large tensors share their memory.
        arrivals: the result of ``adopt`` for the header.
        source: the sender.
        connect: makes those tensors that the sender put into ``tracked`` part of a graph here, in that order;
            without it, they are leaves that require grad.

    Raises:
        FunctionNotFoundError: a function or class that it names cannot be imported here.
        SerializationError: it is malformed, or safe mode does not admit a part of it.
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
    """A way to write and read messages. From any thread.

    ``dump_call`` and ``dumps`` raise ``SerializationError`` if something cannot be sent, which says which
    part, of which type, and why; and another ``RpcError`` if a carrier refuses an object.
    """

    id: int
    """Its number in messages, 0 to 255; 0 is pickle."""

    def dump_call(
        self, func: Function, args: Args, kwargs: Kwargs, to: Destination, *, tracked: Tracked = None
    ) -> Payload:
        """Serialize a call.

        Args:
            func: any callable: see ``functions`` for how it is pickled.
            args, kwargs: its arguments.
            to: the destination.
            tracked: a list for those tensors among the arguments that require grad, in an order that the
                receiver reproduces; None if they are not needed.
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
            to: the destination; None if it is not known, and then names from ``__main__`` are sent by value
                and carriers cannot be used.
            what: for error messages: a text that names the object, or the function that returned it.
            tracked: as for ``dump_call``.
        """

    @property
    def loads(self) -> Load[Any]:
        """Rebuild a value."""


class Codecs(dict[int, Codec]):
    """The codecs of one serializer, by number; a missing one raises ``SerializationError``."""

    def __missing__(self, number: int) -> NoReturn:
        raise SerializationError(f"a message is in codec {number}, which this worker does not have")

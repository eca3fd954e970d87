"""How what calls take and give becomes bytes, and back: the face of this room.

``dump_call`` and ``dumps`` turn a call or a value into a ``Payload``: a header, and buffers in the form of
some codec. On the other side ``adopt`` is called with the header on receipt, and ``load_call`` or ``loads``
with the buffers when somebody wants the object; that is what runs user code. ``dump_exception`` and
``load_exception`` do the same for exceptions. Example::

    payload = caller.dump_call(torch.add, (x, 1), {}, peer)
    ...  # payload.header, payload.buffers and payload.codec reach the other side
    arrivals = callee.adopt(header, peer)
    func, args, kwargs = callee.load_call(header, buffers, arrivals, peer)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from rpc.errors import SerializationError
from rpc.serialization import exceptions, memory
from rpc.serialization.carriers import Carrier, Carriers
from rpc.serialization.codecs import PICKLE, Call, Codec, Codecs
from rpc.serialization.payload import Arrivals, Connect, Destination, Payload, Source
from rpc.serialization.pickle_codec import PickleCodec
from rpc.serialization.pickler import Reducers, plainly
from rpc.serialization.safe import AllowList
from rpc.serialization.settings import Settings, process_settings

__all__ = ["Serializer"]

_SMALL_BYTES: Final = 1024


class Serializer:
    """Serializes for one agent. Register what extends it before messages flow; the rest from any thread.

    Args:
        settings: what users say, at any time.
        safe: read with an allow-list what others send, instead of running whatever pickles say.
    """

    def __init__(self, settings: Settings = process_settings, *, safe: bool = False) -> None:
        memory.warm_up()
        self.allow = AllowList(settings.allowed) if safe else None
        """What safe mode admits; None without safe mode."""
        self._reducers = Reducers()
        self._carriers = carriers = Carriers()
        self.adopt = carriers.adopt
        self.ready = carriers.ready
        self.brings_nothing = carriers.brings_nothing
        self.take_back = carriers.take_back
        self._pickle = PickleCodec(self._reducers, settings, self.allow)
        self.dump_quickly = self._pickle.dump_quickly
        self._codecs = Codecs({PICKLE: self._pickle})

    # ---- extending it

    def register_carrier(self, kind: type, carrier: Carrier) -> None:
        """Have objects of a type travel beside the payload.

        Args:
            kind: the type; types derived from it are meant too.
            carrier: see ``Carrier``. It may carry several types.

        Raises:
            ValueError: another carrier has the same ``carrier.kind``.
        """
        self._carriers.register(carrier)
        self._reducers.register(kind, lambda obj, pickler: pickler.carry(obj, carrier))

    def register_reducer(self, kind: type, reduce: Callable[[Any], Any]) -> None:
        """Say how objects of a type travel in pickles, without changing how they are pickled elsewhere.

        Args:
            kind: the type; types derived from it are meant too, unless they have a reducer of their own.
            reduce: takes the object and returns what ``__reduce_ex__`` may return, or NotImplemented to
                leave the object to plain pickle.

        Example::

            serializer.register_reducer(Connection, lambda connection: (Connection, (connection.url,)))
        """
        self._reducers.register(kind, plainly(reduce))

    def register_codec(self, codec: Codec) -> None:
        """Read and write messages in another codec, too.

        Raises:
            ValueError: its number is taken, or none.
        """
        if not 0 <= codec.id < 256 or self._codecs.setdefault(codec.id, codec) is not codec:
            raise ValueError(f"codec number {codec.id!r} is taken, or not in 0 to 255")

    def allow_function(self, function: Callable[..., Any]) -> None:
        """Admit a function that the agent itself needs to be called, if this is safe mode."""
        if self.allow is not None:
            self.allow.function(function)

    # ---- calls and values

    def dump_call(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        to: Destination,
        *,
        tracked: list[Tensor] | None = None,
        codec: int = PICKLE,
    ) -> Payload:
        """Serialize a call.

        Args:
            func: anything that can be called: see ``functions`` for how it travels.
            args: its positional arguments.
            kwargs: its keyword arguments.
            to: where it goes.
            tracked: a list for those tensors among the arguments that require grad, in an order that the
                receiver finds again; None if nobody wants to know.
            codec: the number of the codec.

        Raises:
            SerializationError: something cannot be sent; names which argument, its type and why. Nothing has
                departed then.
            RpcError: an argument travels beside the payload and refuses, for a reason of its own.
        """
        return self._codecs[codec].dump_call(func, args, kwargs, to, tracked)

    def load_call(
        self,
        header: dict[str, Any],
        buffers: Sequence[Any],
        arrivals: Arrivals | None,
        source: Source,
        *,
        connect: Connect | None = None,
        codec: int = PICKLE,
    ) -> Call:
        """Rebuild a call.

        Args:
            header: the message's header.
            buffers: belong to the receiver now; large tensors are made over their memory.
            arrivals: what ``adopt`` made of the header.
            source: who sent it.
            connect: makes those tensors that the sender put into ``tracked`` part of a graph here, in that
                order; without, they are leaves that require grad.
            codec: the number of the message's codec.

        Raises:
            FunctionNotFoundError: the function, or a class among the arguments, cannot be imported here.
            SerializationError: it cannot be read, or safe mode does not admit something in it.
        """
        return self._codecs[codec].load_call(header, buffers, arrivals, source, connect)

    def dumps(
        self,
        value: Any,
        to: Destination | None,
        *,
        what: object = None,
        tracked: list[Tensor] | None = None,
        codec: int = PICKLE,
    ) -> Payload:
        """Serialize a value.

        Args:
            value: any object.
            to: where it goes; None if that is not known, and then what ``__main__`` defines goes by value and
                nothing can travel beside the payload.
            what: for error messages: a text that names the object, or the function whose result it is.
            tracked: as for ``dump_call``.
            codec: the number of the codec.

        Raises:
            SerializationError: it cannot be sent; says which part of it, of which type, and why.
            RpcError: a part of it travels beside the payload and refuses, for a reason of its own.
        """
        return self._codecs[codec].dump(value, to, what, tracked)

    def loads(
        self,
        header: dict[str, Any],
        buffers: Sequence[Any],
        arrivals: Arrivals | None,
        source: Source,
        *,
        connect: Connect | None = None,
        codec: int = PICKLE,
    ) -> Any:
        """Rebuild what ``dumps`` serialized; arguments and errors as for ``load_call``."""
        return self._codecs[codec].load(header, buffers, arrivals, source, connect)

    # ---- lists of tensors

    def dump_tensors(self, tensors: Sequence[Tensor | None], to: Destination, what: str) -> Payload:
        """Serialize some tensors, such as gradients. One that occurs twice arrives as two.

        Args:
            tensors: of any kind, or None.
            to: where they go.
            what: for error messages: a text that names them.

        Raises:
            SerializationError: one of them cannot be sent.
        """
        sent: list[Tensor | None] = []
        seen: set[int] = set()
        for tensor in tensors:
            if tensor is None:
                sent.append(None)
            else:
                sent.append(tensor.detach() if id(tensor) in seen else _without_gaps(tensor))
                seen.add(id(tensor))
        return self.dumps(sent, to, what=what)

    def load_tensors(self, buffers: Sequence[Any], source: Source) -> list[Tensor | None]:
        """Rebuild what ``dump_tensors`` serialized.

        Raises:
            SerializationError: it cannot be read, or is something else.
        """
        tensors = self.loads({}, buffers, None, source)
        if type(tensors) is not list or not all(each is None or isinstance(each, Tensor) for each in tensors):
            raise SerializationError(f"what worker '{source.name}' sent should be tensors")
        return tensors

    # ---- exceptions

    def dump_exception(
        self, error: BaseException, worker: str, to: Destination | None = None, *, codec: int = PICKLE
    ) -> Payload:
        """Serialize an exception. Never raises, whatever the exception's own methods do.

        Args:
            error: the exception, with its traceback.
            worker: this worker's name, which the caller is told.
            to: the caller. Without it, exception classes that ``__main__`` defines travel by value, so that
                the caller's ``except`` clauses do not match them.
            codec: the number of the codec.
        """
        return exceptions.dump_exception(error, worker, lambda value: self.dumps(value, to, codec=codec))

    def load_exception(
        self,
        header: dict[str, Any],
        buffers: Sequence[Any],
        arrivals: Arrivals | None,
        source: Source,
        *,
        codec: int = PICKLE,
    ) -> Exception:
        """Rebuild an exception. Raises nothing but ``KeyboardInterrupt``; arguments as for ``load_call``."""

        def load() -> Any:
            return self.loads(header, buffers, arrivals, source, codec=codec)

        return exceptions.load_exception(header, source, load if buffers else None)

    def without_exception(self, header: dict[str, Any], reason: BaseException) -> Payload:
        """What is sent in the place of a serialized exception that cannot be sent, since it is too large.

        The caller gets a ``RemoteError`` that has the type, what there is room for of text and traceback,
        and the reason. What travels beside the payload must have been taken back.

        Args:
            header: of the payload, with what the agent has added.
            reason: why it cannot be sent.
        """
        return Payload(exceptions.shortened(self._carriers.without_descriptors(header), reason), [])


def _without_gaps(tensor: Tensor) -> Tensor:
    """A small strided tensor as a contiguous one, such as the gradient of a sum; any other as it is."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    return tensor.contiguous() if tensor.nbytes <= _SMALL_BYTES and type(tensor) is Tensor else tensor

"""Serialization of calls, their results and exceptions: the interface of this package.

``dump_call`` and ``dumps`` of a codec, and ``dump_exception``, make a ``Payload``: a header, and buffers. On
the other side, ``adopt`` is called with the header on receipt, and ``load_call`` or ``loads`` of that codec,
or ``load_exception``, with the buffers when the object is needed; only that runs user code. Example::

    payload = caller.between(False).dump_call(torch.add, (x, 1), {}, peer)
    ...  # payload.header, payload.buffers and payload.codec reach the other side
    arrivals = callee.adopt(header, peer)
    func, args, kwargs = callee.codecs[codec].load_call(header, buffers, arrivals, peer)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from rpc.errors import SerializationError
from rpc.serialization import exceptions, memory
from rpc.serialization.carriers import Carrier, are_ready
from rpc.serialization.codecs import NEUTRAL, PICKLE, Codec, Codecs
from rpc.serialization.neutral_codec import NeutralCodec
from rpc.serialization.payload import EXCEPTION, TRACKED, Arrivals, Destination, Payload, Source
from rpc.serialization.pickle_codec import PickleCodec
from rpc.serialization.pickler import Reducers, plainly
from rpc.serialization.safe import AllowList
from rpc.serialization.settings import Settings, process_settings

OwnCodec = PickleCodec | NeutralCodec
"""A codec that every worker has."""


class Serializer:
    """Serializes for one agent. Register extensions before messages flow; everything else from any thread.

    Args:
        settings: the user's settings, which may change at any time.
        safe: read messages with an allow-list, instead of loading pickles.
    """

    def __init__(self, settings: Settings = process_settings, *, safe: bool = False) -> None:
        memory.warm_up()
        self.allow = AllowList(settings.allowed) if safe else None
        """The allow-list of safe mode; None without safe mode."""
        self._exceptions = (self.allow or settings.allowed).exception
        """Makes exceptions that come without a pickle."""
        self._reducers = Reducers()
        self._settings = settings
        self._carriers: dict[str, Carrier] = {}
        self.brings_nothing: Final = self._carriers.keys().isdisjoint
        """Whether a message with this header has nothing to adopt."""
        self._neutral = neutral = NeutralCodec(self._reducers, self.allow)
        self.codecs = Codecs({NEUTRAL: neutral})
        """Codecs for received messages, by their numbers; in safe mode without pickle."""
        if not safe:
            self._pickle = self.codecs[PICKLE] = PickleCodec(self._reducers, settings)

    def between(self, peer_is_safe: bool) -> OwnCodec:
        """Return the codec for messages to and from a worker that is, or is not, in safe mode."""
        return self._neutral if peer_is_safe or self.allow is not None else self._pickle

    def pickles_as(self, kind: type[PickleCodec]) -> PickleCodec:
        """Read and write pickles with a derived class of their codec from now on. Not in safe mode."""
        if type(self._pickle) is not kind:
            self._pickle = self.codecs[PICKLE] = kind(self._reducers, self._settings)
        return self._pickle

    def register_carrier(self, kind: type, carrier: Carrier) -> None:
        """Have objects of a type, or of one derived from it, travel beside the payload; ``ValueError`` if
        another carrier has the same ``carrier.kind``. A carrier may be registered for several types.
        """
        taken = carrier.kind in (EXCEPTION, TRACKED)
        if taken or self._carriers.setdefault(carrier.kind, carrier) is not carrier:
            raise ValueError(f"carrier kind {carrier.kind!r} is taken")
        self._reducers.register(kind, lambda obj, pickler: pickler.carry(obj, carrier))

    def register_reducer(self, kind: type, reduce: Callable[[Any], Any]) -> None:
        """Define how objects of a type, or of one derived from it, are pickled: ``reduce`` returns what
        ``__reduce_ex__`` may return, or NotImplemented to leave the object to plain pickle. Example::

            serializer.register_reducer(Connection, lambda connection: (Connection, (connection.url,)))
        """
        self._reducers.register(kind, plainly(reduce))

    def register_codec(self, codec: Codec) -> None:
        """Read and write messages in another codec, too; ``ValueError`` if its number is taken or invalid."""
        if not 0 <= codec.id < 256 or self.codecs.setdefault(codec.id, codec) is not codec:
            raise ValueError(f"codec number {codec.id!r} is taken, or not in 0 to 255")

    def allow_function(self, function: Callable[..., Any]) -> None:
        """Admit a function that the agent itself must be able to call, in safe mode."""
        if self.allow is not None:
            self.allow.function(function)

    def adopt(self, header: dict[str, Any], source: Source) -> Arrivals | None:
        """Adopt the objects that travelled beside a message's payload. To be called once, on receipt; returns
        the objects, for loading the payload, or None.

        Raises:
            SerializationError: the header is malformed, or a carrier cannot read its descriptors.
        """
        if self.brings_nothing(header):
            return None
        arrivals: Arrivals = {}
        for kind in self._carriers.keys() & header.keys():
            descriptors = header[kind]
            if type(descriptors) is not list:
                raise SerializationError(
                    f"a message from worker '{source.name}' has a malformed '{kind}' header"
                )
            try:
                arrivals[kind] = self._carriers[kind].arrive(descriptors, source)
            except (MemoryError, OSError):  # the message is not at fault
                raise
            except Exception as error:
                raise SerializationError(
                    f"a message from worker '{source.name}' has unreadable '{kind}' descriptors: {error}"
                ) from error
        return arrivals

    def ready(self, arrivals: Arrivals, when_ready: Callable[[], object]) -> bool:
        """Whether user code may have all that arrived; if not, ``when_ready`` is called once it may."""
        rest = iter([(self._carriers[kind], objects) for kind, objects in arrivals.items()])
        return are_ready(rest, when_ready)

    def take_back(self, header: dict[str, Any], to: Destination) -> None:
        """Notify the carriers that a message with this header was not sent."""
        for kind in header.keys() & self._carriers.keys():
            self._carriers[kind].take_back(header[kind], to)

    def dump_exception(
        self, error: BaseException, worker: str, to: Destination | None = None, *, codec: int = PICKLE
    ) -> Payload:
        """Serialize an exception, with its traceback. Never raises, whatever the exception's own methods do.

        Args:
            error: the exception.
            worker: this worker's name, which the caller sees.
            to: the caller. Without it, exception classes that ``__main__`` defines are sent by value, so that
                the caller's ``except`` clauses do not match them.
            codec: number of the codec.
        """
        if codec == NEUTRAL:
            payload = exceptions.dump_exception(error, worker, None)
            payload.codec = NEUTRAL
            return payload
        chosen = self.codecs[codec]
        return exceptions.dump_exception(
            error, worker, lambda value, what: chosen.dumps(value, to, what=what)
        )

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
            return self.codecs[codec].loads(header, buffers, arrivals, source)

        if codec == NEUTRAL:
            return exceptions.load_exception(header, source, None, self._exceptions)
        safe = self.allow is not None
        return exceptions.load_exception(header, source, load if buffers else None, by_name=not safe)

    def without_exception(self, header: dict[str, Any], reason: BaseException) -> Payload:
        """Return the replacement for a serialized exception that is too large to be sent: the caller gets a
        ``RemoteError`` with the type, as much as fits of text and traceback, and the reason. The objects
        beside the payload must have been taken back.
        """
        kept = {key: value for key, value in header.items() if key not in self._carriers}
        return Payload(exceptions.shortened(kept, reason), [])

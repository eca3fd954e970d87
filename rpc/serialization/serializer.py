"""How what calls take and give becomes bytes, and back: the face of this room.

``dump_call`` and ``dumps`` of a codec, and ``dump_exception``, make a ``Payload``: a header, and buffers. On
the other side ``adopt`` is called with the header on receipt, and ``load_call`` or ``loads`` of that codec,
or ``load_exception``, with the buffers when somebody wants the object; that is what runs user code. Example::

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
"""One of those that every worker has."""


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
        self._exceptions = (self.allow or settings.allowed).exception
        """Makes those that come without a pickle."""
        self._reducers = Reducers()
        self._settings = settings
        self._carriers: dict[str, Carrier] = {}
        self.brings_nothing: Final = self._carriers.keys().isdisjoint
        """Whether there is nothing to adopt in a message with this header."""
        self._neutral = neutral = NeutralCodec(self._reducers, self.allow)
        self.codecs = Codecs({NEUTRAL: neutral})
        """For messages that name theirs; pickles are not read in safe mode."""
        if not safe:
            self._pickle = self.codecs[PICKLE] = PickleCodec(self._reducers, settings)

    def between(self, peer_is_safe: bool) -> OwnCodec:
        """The codec for a worker, which is in safe mode or not, and for what comes from there."""
        return self._neutral if peer_is_safe or self.allow is not None else self._pickle

    def pickles_as(self, kind: type[PickleCodec]) -> PickleCodec:
        """Read and write pickles by a class derived from their codec from now on. Not in safe mode."""
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
        """Say how objects of a type, or of one derived from it, travel in pickles: ``reduce`` returns what
        ``__reduce_ex__`` may return, or NotImplemented to leave the object to plain pickle. Example::

            serializer.register_reducer(Connection, lambda connection: (Connection, (connection.url,)))
        """
        self._reducers.register(kind, plainly(reduce))

    def register_codec(self, codec: Codec) -> None:
        """Read and write messages in another codec, too; ``ValueError`` if its number is taken, or none."""
        if not 0 <= codec.id < 256 or self.codecs.setdefault(codec.id, codec) is not codec:
            raise ValueError(f"codec number {codec.id!r} is taken, or not in 0 to 255")

    def allow_function(self, function: Callable[..., Any]) -> None:
        """Admit a function that the agent itself needs to be called, if this is safe mode."""
        if self.allow is not None:
            self.allow.function(function)

    def adopt(self, header: dict[str, Any], source: Source) -> Arrivals | None:
        """Adopt everything that travelled beside a message's payload. To be called once, on receipt; returns
        the objects, for what loads the payload, or None.

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
        """A message with this header was not sent: tell its carriers."""
        for kind in header.keys() & self._carriers.keys():
            self._carriers[kind].take_back(header[kind], to)

    def dump_exception(
        self, error: BaseException, worker: str, to: Destination | None = None, *, codec: int = PICKLE
    ) -> Payload:
        """Serialize an exception, with its traceback. Never raises, whatever the exception's own methods do.

        Args:
            error: the exception.
            worker: this worker's name, which the caller is told.
            to: the caller. Without it, exception classes that ``__main__`` defines travel by value, so that
                the caller's ``except`` clauses do not match them.
            codec: the number of the codec.
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
        """What is sent in the place of a serialized exception that is too large to be sent: the caller gets a
        ``RemoteError`` with the type, what there is room for of text and traceback, and the reason. What
        travels beside the payload must have been taken back.
        """
        kept = {key: value for key, value in header.items() if key not in self._carriers}
        return Payload(exceptions.shortened(kept, reason), [])

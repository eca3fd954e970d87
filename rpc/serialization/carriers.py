"""Objects that travel beside the payload: an extension point for what must be adopted before it is read.

A remote reference cannot simply be pickled. Its owner must learn of the new reference even if the pickle
fails to load, or is never read because the reply came too late. So the pickle holds a number only, and
what describes the object goes into the message's header, where the receiver adopts it on receipt.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from rpc.errors import SerializationError
from rpc.serialization.payload import EXCEPTION, TRACKED, Arrivals, Destination, Source


class Carrier(Protocol):
    """How objects of a type travel beside the payload. Its methods are called from any thread, with the very
    ``Destination`` and ``Source`` that the serializer was given.
    """

    kind: str
    """The key of the descriptors in the header: short, and no other carrier's."""

    def depart(self, obj: Any, to: Any) -> Any:
        """Called while ``obj`` is pickled, once for each message that it is in; returns a descriptor of it
        that msgpack can encode. ``to`` is None outside of any message, where all it can do is to raise, with
        a reason.
        """

    def take_back(self, descriptors: list[Any], to: Any) -> None:
        """The message that these descriptors were made for was not sent. Must not raise."""

    def arrive(self, descriptors: list[Any], source: Any) -> Sequence[Any]:
        """Turn descriptors into objects, one for each. Called before the pickle is read and possibly
        without it ever being read; the objects are then simply dropped. No user code may run in it.
        """

    def ready(self, objects: Any, when_ready: Callable[[], object]) -> bool:
        """Whether user code may have these objects now. If not, ``when_ready`` is called once, on any thread,
        when it may.
        """


class Carriers:
    """The carriers of one serializer. ``register`` before messages flow; the others from any thread."""

    def __init__(self) -> None:
        self._carriers: dict[str, Carrier] = {}
        self.brings_nothing: Final = self._carriers.keys().isdisjoint
        """Whether there is nothing to adopt in a message with this header."""

    def register(self, carrier: Carrier) -> None:
        """Make a carrier known under its kind; ``ValueError`` if that is taken."""
        taken = carrier.kind in (EXCEPTION, TRACKED)
        if taken or self._carriers.setdefault(carrier.kind, carrier) is not carrier:
            raise ValueError(f"carrier kind {carrier.kind!r} is taken")

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
        return _are_ready(rest, when_ready)

    def take_back(self, header: dict[str, Any], to: Destination) -> None:
        """A message with this header was not sent: tell its carriers."""
        for kind in header.keys() & self._carriers.keys():
            self._carriers[kind].take_back(header[kind], to)

    def without_descriptors(self, header: dict[str, Any]) -> dict[str, Any]:
        """A header without what its carriers have put there."""
        return {key: value for key, value in header.items() if key not in self._carriers}


def _are_ready(rest: Iterator[tuple[Carrier, Any]], when_ready: Callable[[], object]) -> bool:
    """Whether what is left of the arrivals is ready; if not, go on there once the next has become so."""
    go_on = functools.partial(_go_on, rest, when_ready)  # no closure, whose cycle would keep it all
    return all(carrier.ready(objects, go_on) for carrier, objects in rest)


def _go_on(rest: Iterator[tuple[Carrier, Any]], when_ready: Callable[[], object]) -> None:
    if _are_ready(rest, when_ready):
        when_ready()


class _Receiving(threading.local):
    arrivals: Arrivals | None = None


receiving = _Receiving()
"""What belongs to the pickle that this thread reads at the moment."""


def arrived(kind: str, index: int) -> Any:
    """The object that arrived beside the pickle being read. Named in pickles."""
    arrivals = receiving.arrivals
    if arrivals is None or not 0 <= index < len(arrivals.get(kind, ())):
        raise SerializationError(f"the message refers to '{kind}' number {index}, which it does not bring")
    return arrivals[kind][index]

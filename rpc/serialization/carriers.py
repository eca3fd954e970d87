"""Objects that travel beside the pickle: an extension point for what must be adopted before it is read.

A remote reference cannot simply be pickled. Its owner must learn of the new reference even if the pickle
fails to load, or is never read because the reply came too late. So the pickle holds a number only, and
what describes the object goes into the message's header, where the receiver adopts it on receipt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from rpc.errors import SerializationError
from rpc.serialization.payload import TRACKED, Arrivals, Destination, Source

__all__ = [
    "Carrier",
    "adopt",
    "arrived",
    "brings_nothing",
    "ready",
    "receiving",
    "register_kind",
    "take_back",
]


class Carrier(Protocol):
    """How objects of a type travel beside the pickle. Its methods are called from any thread.

    ``to`` and ``source`` are the very ``Destination`` and ``Source`` that ``dumps`` and ``adopt`` were given.
    """

    kind: str
    """The key of the descriptors in the header: short, and no other carrier's."""

    def depart(self, obj: Any, to: Any) -> Any:
        """Called while ``obj`` is pickled, once for each message that it is in.

        Args:
            obj: what is to travel.
            to: where to; None outside of any message (somebody uses a ``PortablePickler`` by itself),
                where all it can do is to raise, with a reason.

        Returns:
            A descriptor of it that msgpack can encode.
        """

    def take_back(self, descriptors: list[Any], to: Any) -> None:
        """The message that these descriptors were made for was not sent. Must not raise."""

    def arrive(self, descriptors: list[Any], source: Any) -> Sequence[Any]:
        """Turn descriptors into objects, one for each. Called before the pickle is read and possibly
        without it ever being read; the objects are then simply dropped. No user code may run in it.
        """

    def ready(self, objects: Any, when_ready: Callable[[], object]) -> bool:
        """Whether user code may have these objects now.

        If not, ``when_ready`` must be called once, on any thread, when it may.
        """


class _Receiving(threading.local):
    arrivals: Arrivals | None = None


receiving = _Receiving()
"""What belongs to the pickle that this thread reads at the moment."""

_carriers: Final[dict[str, Carrier]] = {}


def register_kind(carrier: Carrier) -> None:
    """Make a carrier known under its kind.

    Raises:
        ValueError: another carrier has that kind, or it is one of the header's own keys.
    """
    if carrier.kind in ("!", TRACKED) or _carriers.setdefault(carrier.kind, carrier) is not carrier:
        raise ValueError(f"carrier kind {carrier.kind!r} is taken")


def adopt(header: dict[str, Any], source: Source) -> Arrivals | None:
    """Adopt everything that travelled beside a message's pickle. To be called once, on receipt.

    Returns:
        The objects, for ``loads``; None if there are none.

    Raises:
        SerializationError: the header is malformed, or a carrier cannot read its descriptors.
    """
    arrivals: Arrivals | None = None
    for kind, carrier in _carriers.items():
        if kind not in header:
            continue
        descriptors = header[kind]
        if type(descriptors) is not list:
            raise SerializationError(f"a message from worker '{source.name}' has a malformed '{kind}' header")
        try:
            objects = carrier.arrive(descriptors, source)
        except Exception as error:
            raise SerializationError(
                f"a message from worker '{source.name}' has unreadable '{kind}' descriptors: {error}"
            ) from error
        if arrivals is None:
            arrivals = {}
        arrivals[kind] = objects
    return arrivals


brings_nothing: Final[Callable[[dict[str, Any]], bool]] = _carriers.keys().isdisjoint
"""Whether there is nothing to adopt in a message with this header."""


def ready(arrivals: Arrivals, when_ready: Callable[[], object]) -> bool:
    """Whether user code may have all that arrived; if not, ``when_ready`` is called once it may."""
    return _ready(list(arrivals.items()), when_ready)


def _ready(arrivals: list[tuple[str, Sequence[Any]]], when_ready: Callable[[], object]) -> bool:
    for position, (kind, objects) in enumerate(arrivals):
        rest = arrivals[position + 1 :]

        def go_on(rest: list[tuple[str, Sequence[Any]]] = rest) -> None:
            if _ready(rest, when_ready):
                when_ready()

        if not _carriers[kind].ready(objects, go_on):
            return False
    return True


def take_back(header: dict[str, Any], to: Destination) -> None:
    """A message with this header was not sent: tell its carriers."""
    for kind in header.keys() & _carriers.keys():
        _carriers[kind].take_back(header[kind], to)


def without_descriptors(header: dict[str, Any]) -> dict[str, Any]:
    """A header without what its carriers have put there."""
    return {key: value for key, value in header.items() if key not in _carriers}


def arrived(kind: str, index: int) -> Any:
    """The object that arrived beside the pickle being read. Named in pickles."""
    arrivals = receiving.arrivals
    if arrivals is None or not 0 <= index < len(arrivals.get(kind, ())):
        raise SerializationError(f"the message refers to '{kind}' number {index}, which it does not bring")
    return arrivals[kind][index]

"""Carriers: an extension point for objects that travel beside the payload, and are adopted before it is read.

A remote reference cannot simply be pickled. Its owner must learn of the new reference even if the pickle
fails to load, or is never read because the reply came too late. So the pickle only contains a number, and a
descriptor of the object goes into the message's header, where the receiver adopts it on receipt.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from rpc.errors import SerializationError
from rpc.serialization.payload import Arrivals


class Carrier(Protocol):
    """Defines how objects of a type travel beside the payload. Its methods are called from any thread, with
    the same ``Destination`` and ``Source`` objects that the serializer was given.
    """

    kind: str
    """The key of the descriptors in the header: short, and unique among carriers."""

    def depart(self, obj: Any, to: Any) -> Any:
        """Called while ``obj`` is pickled, once for each message that contains it; returns a descriptor of it
        that msgpack can encode. ``to`` is None outside of any message; then it must raise, with a reason.
        """

    def take_back(self, descriptors: list[Any], to: Any) -> None:
        """Handle that the message with these descriptors was not sent. Must not raise."""

    def arrive(self, descriptors: list[Any], source: Any) -> Sequence[Any]:
        """Turn descriptors into objects, one for each. Called before the pickle is read and possibly without
        it ever being read; the objects are then simply dropped. It must not run user code.
        """

    def ready(self, objects: Any, when_ready: Callable[[], object]) -> bool:
        """Whether user code may have these objects now. If not, ``when_ready`` is called once, on any thread,
        when it may.
        """


def are_ready(rest: Iterator[tuple[Carrier, Any]], when_ready: Callable[[], object]) -> bool:
    """Whether the rest of the arrivals is ready; if not, continue there once the next one has
    become ready.
    """
    go_on = functools.partial(_go_on, rest, when_ready)  # not a closure, whose cycle would keep all alive
    return all(carrier.ready(objects, go_on) for carrier, objects in rest)


def _go_on(rest: Iterator[tuple[Carrier, Any]], when_ready: Callable[[], object]) -> None:
    if are_ready(rest, when_ready):
        when_ready()


class _Receiving(threading.local):
    arrivals: Arrivals | None = None


receiving = _Receiving()
"""Arrivals of the pickle that this thread is reading."""


def arrived(kind: str, index: int) -> Any:
    """Return an object that arrived beside the pickle being read. Named in pickles."""
    arrivals = receiving.arrivals
    if arrivals is None or not 0 <= index < len(arrivals.get(kind, ())):
        raise SerializationError(f"the message refers to '{kind}' number {index}, which it does not bring")
    return arrivals[kind][index]

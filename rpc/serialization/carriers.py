"""Objects that travel beside the payload: an extension point for what must be adopted before it is read.

A remote reference cannot simply be pickled. Its owner must learn of the new reference even if the pickle
fails to load, or is never read because the reply came too late. So the pickle holds a number only, and
what describes the object goes into the message's header, where the receiver adopts it on receipt.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from rpc.errors import SerializationError
from rpc.serialization.payload import Arrivals


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


def are_ready(rest: Iterator[tuple[Carrier, Any]], when_ready: Callable[[], object]) -> bool:
    """Whether what is left of the arrivals is ready; if not, go on there once the next has become so."""
    go_on = functools.partial(_go_on, rest, when_ready)  # no closure, whose cycle would keep it all
    return all(carrier.ready(objects, go_on) for carrier, objects in rest)


def _go_on(rest: Iterator[tuple[Carrier, Any]], when_ready: Callable[[], object]) -> None:
    if are_ready(rest, when_ready):
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

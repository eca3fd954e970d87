"""Events on an agent, for metrics, traces and profilers.

Handlers are called on the thread on which an event happens, which may be the agent's loop: they must be quick
and must not block. Their exceptions are logged. Without a listener, an event costs one test of an attribute
and is not even made::

    tell = events.call_begun
    if tell is not None:
        tell(call_id, to, ...)  # the fields of ``CallBegun``, in order

Example::

    from farcall import rpc
    from farcall.rpc import events

    durations = {}
    with events.listen(events.CallEnded, lambda call: durations.setdefault(call.to, []).append(call.seconds)):
        rpc.rpc_sync("worker1", torch.add, args=(x, y))
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from rpc.runtime.current import current_agent

__all__ = [
    "CallBegun",
    "CallEnded",
    "CallSerialized",
    "Events",
    "MessageReceived",
    "MessageSent",
    "PeerJoined",
    "PeerLost",
    "RequestBegun",
    "RequestEnded",
    "RunBegun",
    "RunEnded",
    "listen",
]

logger = logging.getLogger(__name__)

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class CallBegun:
    """At the caller: a call, or another request that is answered, is about to be sent."""

    call_id: int  # unique among those of this worker; the callee's events have it, too
    to: str  # the callee's name
    what: str  # name of what is called or requested
    asked: object = None  # as passed to the call: the function, or a text
    how: str = "async"  # "sync" if a thread waits for it, "remote" if its value stays at the callee
    header: dict[str, Any] | None = None  # sent along; a handler may add what msgpack can encode


@dataclass(frozen=True, slots=True)
class CallEnded:
    """At the caller: a call that began while there was a listener for this or for ``CallBegun`` has ended."""

    call_id: int
    to: str
    what: str
    seconds: float  # duration
    error: BaseException | None  # why there is no answer; None if there is one, even if it is an exception
    header: dict[str, Any] | None = None  # header of the answer


@dataclass(frozen=True, slots=True)
class RequestBegun:
    """At the callee: a request of another worker has arrived. It runs when a thread is free."""

    source: str  # the caller's name
    call_id: int  # as in the caller's events


@dataclass(frozen=True, slots=True)
class RunBegun:
    """At the callee: this thread begins to run the function of a request."""

    source: str  # the caller's name
    call_id: int  # as in the caller's events
    what: object  # the function
    queued: float  # seconds from the arrival of the request until a thread was free
    loaded: float  # seconds for deserializing the function and its arguments


@dataclass(frozen=True, slots=True)
class RunEnded:
    """At the callee: the function has returned or raised, on the thread that ran it."""

    source: str
    call_id: int


@dataclass(frozen=True, slots=True)
class CallSerialized:
    """At the caller: the function and arguments of a call have been serialized; ``CallBegun`` follows."""

    to: str  # the callee's name
    what: object  # the function
    seconds: float
    size: int  # in bytes


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """At the callee: the answer to a request is being sent."""

    source: str
    call_id: int
    failed: bool  # the answer is an exception


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """Another worker has become known."""

    name: str
    id: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Another worker is gone for good: it left, died or was cut off."""

    name: str
    id: int
    reason: str


@dataclass(frozen=True, slots=True)
class MessageSent:
    """A request or an answer is about to be written to a connection or to shared memory."""

    to: str  # the receiver's name
    kind: int  # a ``rpc.wire.frames.Kind``
    size: int  # size of the payload in bytes, without headers
    call_id: int = 0  # of its call; for an answer, as in the caller's events


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message has arrived."""

    source: str  # the sender's name
    kind: int
    size: int


Handlers = dict[object, Callable[..., object]]
"""The handlers of a kind, by registration."""

Tell = Callable[..., object]
"""Takes the fields of an event, in their order, and tells the handlers of it."""


class Events:
    """The handlers of one agent's events: for each kind the function that calls them, or None.

    From any thread. A subscription may end at any time: load the attribute once, then test and call that.
    """

    call_begun: Tell | None
    call_ended: Tell | None
    request_begun: Tell | None
    run_begun: Tell | None
    run_ended: Tell | None
    call_serialized: Tell | None
    request_ended: Tell | None
    peer_joined: Tell | None
    peer_lost: Tell | None
    message_sent: Tell | None
    message_received: Tell | None

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer that runs while it is held may end a subscription
        self._changes = 0
        self._handlers: dict[type, Handlers] = {kind: {} for kind in _ATTRIBUTES}
        self._recorders: dict[type, Handlers] = {kind: {} for kind in _ATTRIBUTES}
        for attribute in _ATTRIBUTES.values():
            setattr(self, attribute, None)

    def listen(self, kind: type[E], handler: Callable[[E], object]) -> ExitStack:
        """Have ``handler`` called with each event of a kind from now on; see ``rpc.events.listen``."""
        return self._add(self._handlers, kind, handler)

    def record(self, kind: type, recorder: Tell) -> ExitStack:
        """Have ``recorder`` called with the fields of each event of a kind, in their order.

        Making the event takes longer than recording it: this is for traces. It must not raise.
        """
        return self._add(self._recorders, kind, recorder)

    def _add(self, where: dict[type, Handlers], kind: type, handler: Callable[..., object]) -> ExitStack:
        if kind not in _ATTRIBUTES:
            known = ", ".join(each.__name__ for each in _ATTRIBUTES)
            raise TypeError(f"{kind!r} is no kind of event; there are: {known}")

        registration = object()

        def end() -> None:
            with self._lock:
                ended = where[kind].pop(registration, None)
                self._compose(kind)
            del ended

        with self._lock:
            where[kind][registration] = handler
            self._compose(kind)
        subscription = ExitStack()
        subscription.callback(end)
        return subscription

    def _compose(self, kind: type) -> None:
        """Make the function that calls the handlers of a kind, which have changed. With the lock."""
        self._changes += 1
        changes = -1
        while changes != self._changes:  # a finalizer has changed them again meanwhile
            changes = self._changes
            setattr(self, _ATTRIBUTES[kind], self._composed(kind))

    def _composed(self, kind: type) -> Tell | None:
        handlers = list(self._handlers[kind].values())
        recorders = list(self._recorders[kind].values())

        def tell(*fields: Any) -> None:
            for recorder in recorders:
                recorder(*fields)
            if handlers:
                event = kind(*fields)
                for handler in handlers:
                    try:
                        handler(event)
                    except Exception:
                        logger.exception("a handler of %s failed", kind.__name__)

        alone = recorders[0] if len(recorders) == 1 and not handlers else tell
        return alone if handlers or recorders else None


_ATTRIBUTES: Final[dict[type, str]] = {
    kind: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()  # ``call_begun`` for ``CallBegun``
    for kind in (
        *(CallSerialized, CallBegun, CallEnded),
        *(RequestBegun, RunBegun, RunEnded, RequestEnded),
        *(PeerJoined, PeerLost, MessageSent, MessageReceived),
    )
}


def listen(kind: type[E], handler: Callable[[E], object]) -> ExitStack:
    """Have ``handler`` called with each event of a kind on this process's agent, until it is shut down.

    Args:
        kind: class of the events, such as ``CallEnded``.
        handler: called on the thread on which the event happens; must be quick and must not block.

    Returns:
        A context manager that ends the registration, on ``close()`` or at the end of a ``with`` statement.

    Raises:
        NotInitializedError: there is no agent.
        TypeError: there is no such kind.
    """
    events: Events = current_agent().events
    return events.listen(kind, handler)

"""Extension point: a tape that follows calls and records the tensors that require grad.

With a tape, distributed autograd can be built on the agent without the agent knowing what it is. The sender
records what it sends, and adds a value to the message's header under the tape's key; the receiver makes the
received tensors part of a graph of its own, and runs the request inside the recording for that value.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from torch import Tensor

from rpc.group.peer import Peer
from rpc.serialization.payload import Connect
from rpc.serialization.serializer import Serializer

__all__ = ["Observation", "Recording", "Tape", "Tracing", "note"]


class Recording(Protocol):
    """The recording of one call's messages, at one of its ends. Blocks under it run inside it, one after
    another.
    """

    tracks: bool
    """Whether tensors that require grad are recorded; otherwise they are sent as tensors that do not."""

    def sent(self, tensors: list[Tensor], to: Peer) -> Any:
        """Record the tensors that require grad of a message that is about to be sent; returns the value for
        its header, which msgpack can encode.
        """

    def connect(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """Return the replacements for the tensors of the message that it was made for; see ``Connect``."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Observation:
    """Encloses one request that is observed, for example by a profiler, and its recording.

    Args:
        inner: the request's recording, if any.
    """

    inner: Recording | Observation | None

    def __init__(self, inner: Recording | Observation | None) -> None:
        self.inner = inner

    @property
    def connect(self) -> Connect | None:
        return None if self.inner is None else self.inner.connect

    def __enter__(self) -> None:
        if self.inner is not None:
            self.inner.__enter__()

    def __exit__(self, *_: object) -> None:
        if self.inner is not None:
            self.inner.__exit__()

    def following(self, coroutine: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        """Return the rest of an ``async def`` request, to be awaited inside this."""
        return self.inner.following(coroutine) if isinstance(self.inner, Observation) else coroutine

    def tell(self, header: dict[str, Any]) -> None:
        """Add the observations to the header of the answer, which is not a failure."""


class Tape(Protocol):
    """Follows calls. Called from any thread."""

    key: str
    """Its key in headers, which no carrier uses."""

    def current(self) -> object:
        """Return None if calls made now, on this thread, are not recorded: ``calling`` need not be called."""

    def calling(self, to: Peer) -> Recording | None:
        """Return the recording for a call made now, on this thread; None if it is not recorded."""

    def received(self, value: Any, source: Peer) -> Recording | None:
        """Return the recording for a request whose header has ``value``, and for its answer; None if there is
        none.
        """

    def answered(self, value: Any, source: Peer) -> Recording | None:
        """Like ``received``, for an answer: None if the recording of its call is over."""


class Tracing:
    """The tape and the observers of one agent's calls. Used from any thread; set before the agent joins its
    group, except by ``watch``.

    Attributes:
        tape: records the tensors of calls, or None.
        watcher: makes the observation of every request, or None.
    """

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.watcher: Callable[[Recording | Observation | None], Observation] | None = None
        self._observers: dict[str, Callable[[Any, Recording | Observation | None], Observation]] = {}

    def follow(self, tape: Tape) -> None:
        """Have a tape record the tensors of calls."""
        self.tape = tape

    def observe(
        self, key: str, observe: Callable[[Any, Recording | Observation | None], Observation]
    ) -> None:
        """Have ``observe`` make the observation of each request whose header has a key, given the value under
        it, and what is inside: the request's recording, or the observation of an earlier key.
        """
        self._observers[key] = observe

    def watch(self, watcher: Callable[[Recording | Observation | None], Observation] | None) -> None:
        """Have ``watcher`` make the observation of every request from now on; None to stop."""
        self.watcher = watcher

    def recording_of(
        self, header: dict[str, Any], source: Peer, *, answer: bool = False
    ) -> Recording | Observation | None:
        """Return the recording for a request, or an answer, with this header."""
        tape = self.tape
        recording: Recording | Observation | None = None
        if tape is not None and tape.key in header:
            follow = tape.answered if answer else tape.received
            recording = follow(header[tape.key], source)
        if not answer:
            for key, observe in self._observers.items():
                if key in header:
                    recording = observe(header[key], recording)
        return recording


def note(
    tape: Tape,
    recording: Recording,
    tensors: list[Tensor],
    header: dict[str, Any],
    to: Peer,
    serializer: Serializer,
) -> None:
    """Record a message that is about to be sent, and add the tape's value to its header."""
    try:
        header[tape.key] = recording.sent(tensors, to)
    except BaseException:
        serializer.take_back(header, to)
        raise

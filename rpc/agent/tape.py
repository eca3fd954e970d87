"""Extension point: something that follows calls, and notes what tensors that require grad they carry.

With a tape, distributed autograd can be built on the agent without the agent knowing what it is. The sender
notes what it sent, and says so under a key of the message's header; the receiver makes the received tensors
part of a graph of its own, and runs what it is asked to inside what the header says.
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
    """What the messages of one call are noted in, at one of its ends. Blocks under it run in it, in turn."""

    tracks: bool
    """Whether tensors that require grad are noted; else they are sent as such that don't."""

    def sent(self, tensors: list[Tensor], to: Peer) -> Any:
        """Note the tensors that require grad of a message that is about to be sent; returns what its header
        is to say, as msgpack can encode it.
        """

    def connect(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """What stands for the tensors of the message that it was made for; see ``Connect``."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Observation:
    """Round one request that is observed, as by a profiler, and round what it is noted in.

    Args:
        inner: the recording that the request has besides, if any.
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
        """The rest of an ``async def`` request, to be awaited inside this."""
        return self.inner.following(coroutine) if isinstance(self.inner, Observation) else coroutine

    def tell(self, header: dict[str, Any]) -> None:
        """Add what was observed to the header of the answer, which is no failure."""


class Tape(Protocol):
    """Called from any thread."""

    key: str
    """Its place in the header: not that of any carrier."""

    def current(self) -> object:
        """None if no call made now, on this thread, is noted: ``calling`` need not be asked."""

    def calling(self, to: Peer) -> Recording | None:
        """What a call made now, on this thread, is noted in; None if it isn't noted."""

    def received(self, value: Any, source: Peer) -> Recording | None:
        """What a request is noted in whose header says ``value``, and its answer, too; None if in nothing."""

    def answered(self, value: Any, source: Peer) -> Recording | None:
        """The same for an answer: None if what its call was noted in is over."""


class Tracing:
    """What follows the calls of one agent. Asked from any thread; set before the agent joins its group,
    except by ``watch``.

    Attributes:
        tape: notes what tensors calls carry, or None.
        watcher: makes the observation of every request, or None.
    """

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.watcher: Callable[[Recording | Observation | None], Observation] | None = None
        self._observers: dict[str, Callable[[Any, Recording | Observation | None], Observation]] = {}

    def follow(self, tape: Tape) -> None:
        """Have a tape note what tensors calls carry."""
        self.tape = tape

    def observe(
        self, key: str, observe: Callable[[Any, Recording | Observation | None], Observation]
    ) -> None:
        """Have ``observe`` make the observation of each request whose header has a key, given what is said
        under it, and what is inside: the recording of the request, or the observation of an earlier key.
        """
        self._observers[key] = observe

    def watch(self, watcher: Callable[[Recording | Observation | None], Observation] | None) -> None:
        """Have ``watcher`` make the observation of every request from now on; None ends that."""
        self.watcher = watcher

    def recording_of(
        self, header: dict[str, Any], source: Peer, *, answer: bool = False
    ) -> Recording | Observation | None:
        """What a request with this header, or an answer, is noted in."""
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
    """Note what a message carries that is about to be sent, and say so in its header."""
    try:
        header[tape.key] = recording.sent(tensors, to)
    except BaseException:
        serializer.take_back(header, to)
        raise

"""Interfaces of ``rpc.devices`` to the agent, which does not import it unless messages use devices."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

from torch import Tensor

__all__ = ["ArrivedTensors", "Attempt", "Ready", "RequestDevices", "RequestStreams", "SharedWork"]


class RequestStreams(AbstractContextManager[Any], Protocol):
    """Streams of devices that a request runs on; see ``rpc.devices.streams``."""

    def loaded(self) -> None:
        """The request's message has been read."""

    def share(self) -> None:
        """Have later uses of the same objects wait for the work so far."""

    def of_coroutine(self) -> RequestStreams:
        """Return the same streams for the request's coroutine, which another thread may begin at once."""

    def around(self, function: Callable[..., Any], /) -> Callable[..., Any]:
        """Return a function that runs on these streams."""

    def follow(self, coroutine: Coroutine[Any, Any, Any], /) -> Coroutine[Any, Any, Any]:
        """Return a coroutine whose every step is on these streams."""


class Attempt:
    """Streams on which something is answered, as a context manager. If a device does not work, the block runs
    without them, and answers with the error.

    Args:
        make: makes the streams.

    Attributes:
        streams: the streams; None if they cannot be used.
        error: why they cannot be used.
    """

    __slots__ = ("_make", "error", "streams")

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.streams: Any = None
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        try:
            streams = self._make()
            streams.__enter__()
        except BaseException as error:
            self.error = error
        else:
            self.streams = streams
        return self

    def __exit__(self, *raised: object) -> None:
        if self.streams is not None:
            self.streams.__exit__(*raised)


class Ready(Protocol):
    """Device work that must be done before something is used."""

    def join(self) -> None:
        """Make the current streams wait for the work."""


class SharedWork(Protocol):
    """Device work that several streams add to, one after another. From any thread."""

    def join(self, value: Any = None, /) -> None:
        """Make the current streams wait for the work, and keep the memory of the tensors in a value until
        they are done.
        """

    def wait(self) -> None:
        """Like ``join``, for streams whose work is not added."""

    def renew(self) -> None:
        """Add the work that is on the current streams now."""


class ArrivedTensors(Ready, Protocol):
    """Tensors on devices in a future's value, and the work that brought them."""

    def streams(self) -> Any:
        """Return a context manager with separate streams on the same devices."""


class RequestDevices(Protocol):
    """An agent's use of devices; see ``rpc.devices.installation``."""

    def around(self, run: Callable[[Any], None], /) -> Callable[[Any], None]:
        """Return a function that runs requests on separate streams."""

    @property
    def updates(self) -> SharedWork:
        """The work that changes parameters in place."""

    def streams(self) -> Any:
        """Return a context manager with separate streams on all devices that messages use."""

    def current_streams(self) -> RequestStreams:
        """Return the current streams of this thread, for another thread to run on."""

    def use(self, tensors: Iterable[Tensor | None], /) -> None:
        """Keep the memory of tensors on devices until the current streams have used it."""

    def ready(self) -> SharedWork:
        """Return the work that streams must join before they use a value made on the current ones."""

    def object_ready(self) -> SharedWork:
        """As ``ready``, for an object that requests use, which may be large."""

"""What the agent's parts need of ``rpc.devices``, which is not imported where messages use no devices."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from torch import Tensor

__all__ = ["ArrivedTensors", "Ready", "RequestDevices", "RequestStreams", "SharedWork"]


class RequestStreams(Protocol):
    """Streams of devices that a request runs on; see ``rpc.devices.streams``."""

    def share(self) -> None:
        """Have what uses the same objects from now on wait for the work so far."""

    def follow(self, coroutine: Coroutine[Any, Any, Any], /) -> Coroutine[Any, Any, Any]:
        """A coroutine whose every step is on these streams."""

    def around(self, function: Callable[..., Any], /) -> Callable[..., Any]:
        """A function that runs on these streams."""


class Ready(Protocol):
    """Work on devices that must be done before something is used."""

    def join(self) -> None:
        """Make the current streams wait for the work."""


class SharedWork(Protocol):
    """Work on devices that several streams add to, one after another. From any thread."""

    def join(self, tensors: Iterable[Tensor] = (), /) -> None:
        """Make the current streams wait for the work, and keep the memory of tensors until they are done."""

    def renew(self) -> None:
        """Add the work that is on the current streams now."""


class ArrivedTensors(Ready, Protocol):
    """Tensors on devices that a future has, and the work that brought them."""

    def streams(self) -> Any:
        """Streams of their own on the same devices, as a context manager."""


class RequestDevices(Protocol):
    """What an agent does with devices; see ``rpc.devices.installation``."""

    def around(self, run: Callable[[Any], None], /) -> Callable[[Any], None]:
        """What runs requests, on streams of their own."""

    @property
    def updates(self) -> SharedWork:
        """The work that changes parameters in place."""

    def streams(self) -> Any:
        """Streams of their own on all devices that messages use, as a context manager."""

    def use(self, tensors: Iterable[Tensor | None], /) -> None:
        """Keep the memory of tensors, where they are on devices, until the current streams have used it."""

    def ready(self, value: Any, /) -> SharedWork:
        """What streams must join before they use a value that was made on the current ones."""

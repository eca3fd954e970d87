"""What one message carries, and the two ends that it travels between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

Buffer = bytes | bytearray | memoryview
"""A contiguous run of bytes: ``len()`` is their number."""

Arrivals = dict[str, Sequence[Any]]
"""What travelled beside a payload and has been adopted: the objects, by the kind of their carrier."""

Connect = Callable[[list[Tensor]], Sequence[Tensor]]
"""Makes those tensors of a message that require grad at the sender part of the receiver's graph: takes
their values, returns what stands for them."""

Tracked = list[Tensor] | None
"""Where those tensors of a message go that require grad; None if nobody wants to know."""

EXCEPTION: Final = "!"
"""The header's key for the description of an exception."""

TRACKED: Final = "tensors"
"""The header's key for the buffer with the tensors that were pickled apart, since they require grad."""


class Destination(Protocol):
    """Where a message goes: a worker's name, and its ``main_identity()``, "" if that is not known."""

    @property
    def name(self) -> str: ...

    @property
    def main(self) -> str: ...


class Source(Protocol):
    """Where a message came from: a worker's name."""

    @property
    def name(self) -> str: ...


class Staging(Protocol):
    """Copies of device tensors that are being made for one message."""

    def owns(self, memory: memoryview) -> bool:
        """Whether this memory is such a copy, which may not be read yet."""

    def begin(self) -> bool:
        """Start copying, in the order of the current streams; false if there is nothing to copy."""

    def when_done(self, callback: Callable[[BaseException | None], object]) -> None:
        """Have ``callback`` called once, on another thread: with None when all copies are made, or with the
        error that the device reports.
        """


class Placement(Protocol):
    """Where tensors go that are in calls, or in answers, to one worker. From any thread."""

    takes_cpu: bool
    """Whether CPU tensors go to a device."""

    def target(self, device: torch.device) -> torch.device | None:
        """The receiver's device for tensors on ``device``; None for a CPU tensor that stays one.

        Raises:
            SerializationError: no device map has this device; the error says how to add it.
        """

    def reduce(
        self,
        elements: Tensor,
        layout: tuple[str, tuple[int, ...], tuple[int, ...]],
        requires_grad: bool,
        departing: Any,
    ) -> tuple[Any, ...]:
        """Reduce a strided tensor that goes to or comes from a device.

        Args:
            elements: its memory, as a contiguous tensor of one dimension.
            layout: the name of its dtype, its shape and its stride.
            requires_grad: as the receiver is to set it.
            departing: what writes the message. Without a staging, the copy is made at once.
        """

    def staging(self, *, alone: bool = False) -> Staging | None:
        """The staging of a new message; None if it can have none. ``alone``: nothing travels beside it."""


class PeerDevices(Protocol):
    """What is agreed with one worker about devices."""

    @property
    def calls(self) -> Placement:
        """Where tensors in calls go: by this worker's device map."""

    @property
    def answers(self) -> Placement:
        """Where tensors in answers go: by the reverse of the other worker's device map."""

    def streams(self) -> Any:
        """A context manager: streams of their own for what arrives from the worker; see
        ``rpc.devices.streams``.
        """


@dataclass(slots=True, eq=False)
class Payload:
    """A serialized object: a header and the buffers that belong to it.

    Attributes:
        header: what must be known before the buffers are read, as msgpack can encode it; mostly empty. Its
            keys are the kinds of carriers, ``EXCEPTION`` and ``TRACKED``; the agent may add its own.
        buffers: of a pickle, itself first, always ``bytes``; all others may *be* the memory of the caller's
            tensors or arrays, which they keep alive, and change when the caller changes these.
        codec: the number of the codec that they are in.
        staging: where buffers are copies of device tensors that are still being made; else None.
    """

    header: dict[str, Any]
    buffers: list[Any]
    codec: int = 0
    staging: Staging | None = None

"""The content of a message, its destination and its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

Buffer = bytes | bytearray | memoryview
"""A contiguous run of bytes: ``len()`` is their number."""

Arrivals = dict[str, Sequence[Any]]
"""Objects that travelled beside a payload and were adopted, by the kind of their carrier."""

Connect = Callable[[list[Tensor]], Sequence[Tensor]]
"""Makes those tensors of a message that require grad at the sender part of the receiver's graph. Takes their
values, returns tensors to use in their place.
"""

Tracked = list[Tensor] | None
"""Collects those tensors of a message that require grad; None if they are not needed."""

EXCEPTION: Final = "!"
"""Header key of an exception's description."""

TRACKED: Final = "tensors"
"""Header key of the buffer with the tensors that were pickled separately, since they require grad."""


class Destination(Protocol):
    """The destination of a message: a worker's name, and its ``main_identity()``, or "" if that is
    not known.
    """

    @property
    def name(self) -> str: ...

    @property
    def main(self) -> str: ...


class Source(Protocol):
    """The source of a message: a worker's name."""

    @property
    def name(self) -> str: ...


class Staging(Protocol):
    """Copies of device tensors that are being made for one message.

    Attributes:
        is_wanted: whether the message must still be sent when they are made; None if it must in any case.
    """

    is_wanted: Callable[[], bool] | None

    def owns(self, memory: memoryview) -> bool:
        """Whether this memory belongs to such a copy, which may not be read yet."""

    def begin(self) -> bool:
        """Start copying, in the order of the current streams; false if there is nothing to copy."""

    def when_done(self, callback: Callable[[BaseException | None], object]) -> None:
        """Have ``callback`` called once, on another thread: with None when all copies are made, or with the
        error that the device reports.
        """


class Placement(Protocol):
    """Maps devices of tensors in calls, or in answers, to one worker. From any thread."""

    takes_cpu: bool
    """Whether CPU tensors go to a device."""

    def target(self, device: torch.device) -> torch.device | None:
        """Return the receiver's device for tensors on ``device``; None for a CPU tensor that stays on the
        CPU.

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
            requires_grad: the value for the receiver.
            departing: the writer of the message. Without a staging, the copy is made at once.
        """

    def staging(self, *, alone: bool = False) -> Staging | None:
        """Return the staging of a new message; None if it has none. ``alone``: no objects travel
        beside it.
        """


class PeerDevices(NamedTuple):
    """The agreement with one worker about devices.

    Attributes:
        calls: placement of tensors in calls: by this worker's device map.
        answers: placement of tensors in answers: by the inverse of the other worker's device map.
    """

    calls: Placement
    answers: Placement


@dataclass(slots=True, eq=False)
class Payload:
    """A serialized object: a header and the buffers that belong to it.

    Attributes:
        header: data that is needed before the buffers are read, as msgpack can encode it; usually empty. Its
            keys are the kinds of carriers, ``EXCEPTION`` and ``TRACKED``; the agent may add its own.
        buffers: for a pickle, the pickle itself first, always ``bytes``; all others may *be* the memory of
            the caller's tensors or arrays, which they keep alive, and change when the caller changes these.
        codec: number of the codec that wrote them.
        staging: set if buffers are copies of device tensors that are still being made; otherwise None.
    """

    header: dict[str, Any]
    buffers: list[Any]
    codec: int = 0
    staging: Staging | None = None

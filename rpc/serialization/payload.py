"""What one message carries, and the two ends that it travels between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

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


@dataclass(slots=True, eq=False)
class Payload:
    """A serialized object: a header and the buffers that belong to it.

    Attributes:
        header: what must be known before the buffers are read, as msgpack can encode it; mostly empty. Its
            keys are the kinds of carriers, ``EXCEPTION`` and ``TRACKED``; the agent may add its own.
        buffers: of a pickle, itself first, always ``bytes``; all others may *be* the memory of the caller's
            tensors or arrays, which they keep alive, and change when the caller changes these.
        codec: the number of the codec that they are in.
    """

    header: dict[str, Any]
    buffers: list[Any]
    codec: int = 0

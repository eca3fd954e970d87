"""Registered memory, views of it, and descriptors that are sent to peers."""

from __future__ import annotations

import json
import operator
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Self

import torch

__all__ = ["FarcallMemory", "FarcallMemoryView", "FarcallMutableMemoryView", "FarcallRemoteBuffer", "Region"]

_VERSION: Final = 1
_FIELDS: Final = {"endpoint": str, "region": int, "length": int}


@dataclass(eq=False, slots=True)
class Region:
    """One registration.

    Attributes:
        owner: the transport that it belongs to.
        number: identifies it among the regions of its owner.
        tensor: the tensor that was registered.
        data: its memory, as bytes.
        active: whether it has not been unregistered.
        pending: number of transfers under way that use it.
    """

    owner: Any
    number: int
    tensor: torch.Tensor
    data: torch.Tensor
    active: bool = True
    pending: int = 0
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.tensor.data_ptr()

    def check(self) -> None:
        """Raise ``RuntimeError`` unless its memory may be used."""
        if not self.active:
            raise RuntimeError("memory has been unregistered")
        if self.tensor.data_ptr() != self.address or self.tensor.nbytes != self.data.nbytes:
            raise RuntimeError("registered tensor was resized or its storage was replaced")


class FarcallMemoryView:
    """A range of registered memory, in bytes."""

    def __init__(self, region: Region, offset: int, length: int) -> None:
        self.region = region
        self.offset = offset
        self._length = length

    def size(self) -> int:
        """Length in bytes."""
        return self._length

    def data(self) -> torch.Tensor:
        """The bytes themselves."""
        return self.region.data[self.offset : self.offset + self._length]


class FarcallMutableMemoryView(FarcallMemoryView):
    """A range of registered memory that may be written to."""

    writable: Literal[True] = True


@dataclass(frozen=True)
class FarcallRemoteBuffer:
    """Memory that a peer has registered.

    Attributes:
        endpoint: identifies the peer's transport.
        region: the registration there.
        length: in bytes.
    """

    endpoint: str
    region: int
    length: int

    def serialize(self) -> bytes:
        """As bytes that can be sent to the peer."""
        return json.dumps({"farcall": _VERSION} | asdict(self)).encode()

    @classmethod
    def deserialize(cls, data: bytes) -> Self:
        """The reverse of ``serialize``; runs nothing that ``data`` names.

        Raises:
            TypeError: ``data`` is not bytes.
            ValueError: ``data`` is no such descriptor.
        """
        if type(data) is not bytes:
            raise TypeError(f"a serialized descriptor is bytes, not {type(data).__name__}")
        try:
            found = json.loads(data)
        except ValueError as error:
            raise ValueError(f"not a descriptor of farcall's: {error}") from None
        if not isinstance(found, dict) or set(found) != {"farcall", *_FIELDS} or found["farcall"] != _VERSION:
            raise ValueError("not a descriptor of farcall's, or one of another version")
        for name, kind in _FIELDS.items():
            if type(found[name]) is not kind or (kind is int and found[name] < 0):
                raise ValueError(f"a descriptor of farcall's with {name}={found[name]!r}")
        return cls(**{name: found[name] for name in _FIELDS})


class FarcallMemory:
    """A tensor registered with a transport."""

    def __init__(self, region: Region) -> None:
        self.region = region

    def _range(self, offset: int | None, length: int | None) -> tuple[int, int]:
        self.region.check()
        size = self.region.data.nbytes
        begin = 0 if offset is None else operator.index(offset)
        if not 0 <= begin <= size:
            raise ValueError(f"offset {begin} is outside registered memory of {size} bytes")
        count = size - begin if length is None else operator.index(length)
        if not 0 <= count <= size - begin:
            raise ValueError(
                f"a view of {count} bytes from {begin} exceeds registered memory of {size} bytes"
            )
        return begin, count

    def to_view(self, offset: int | None = None, length: int | None = None) -> FarcallMemoryView:
        """A range that is read from; default: all of it."""
        return FarcallMemoryView(self.region, *self._range(offset, length))

    def to_mutable_view(
        self, offset: int | None = None, length: int | None = None
    ) -> FarcallMutableMemoryView:
        """A range that may be written to; default: all of it."""
        return FarcallMutableMemoryView(self.region, *self._range(offset, length))

    def to_remote_buffer(self, *, timeout: float | None = None) -> FarcallRemoteBuffer:
        """The descriptor for the peer."""
        self.region.check()
        return FarcallRemoteBuffer(self.region.owner.endpoint, self.region.number, self.region.data.nbytes)

"""The common part of codecs that read a record: a message's first buffer, with the other buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor

from rpc.errors import NoMemoryError, RpcError, SerializationError
from rpc.runtime.interrupts import is_interruption
from rpc.serialization.codecs import Load
from rpc.serialization.failures import unreadable
from rpc.serialization.payload import TRACKED, Arrivals, Connect, Source
from rpc.serialization.pickler import Read, load
from rpc.serialization.tracked import rebuilt
from rpc.wire.reassembly import Incomplete

__all__ = ["Reading", "load_tensors", "loader"]

_TENSORS: Final = frozenset((Tensor, NoneType))

_inference = torch.is_inference_mode_enabled


class Reading(Protocol):
    """A codec that reads records."""

    @property
    def read(self) -> Read: ...


C = TypeVar("C", bound=Reading)
R = TypeVar("R")


def loader(build: Callable[[C, Any, Connect | None], R], what: str) -> Load[R]:
    """Return a codec's method that reads a message and builds the object that its record describes.

    Args:
        build: makes the object from the record.
        what: description of a message for errors, with a placeholder for the sender's name.
    """

    def loads(
        self: C,
        header: dict[str, Any],
        buffers: Sequence[Any],
        arrivals: Arrivals | None,
        source: Source,
        *,
        connect: Connect | None = None,
    ) -> R:
        if _inference():
            with torch.inference_mode(False):  # a received tensor does not depend on the reader's mode
                return loads(self, header, buffers, arrivals, source, connect=connect)
        if type(buffers) is Incomplete:
            raise _without_memory(buffers, what.format(source.name))
        try:
            if arrivals is None and len(buffers) == 1:
                return build(self, self.read(buffers[0]), connect)
            if TRACKED in header:
                buffers, arrivals = rebuilt(header, buffers, arrivals, connect, self.read)
            return build(self, load(buffers, arrivals, self.read), connect)
        except RpcError:
            raise
        except Exception as error:
            if is_interruption(error):
                raise
            raise unreadable(error, what.format(source.name)) from error

    return loads  # type: ignore[return-value]  # without ``self``, once it is a method


def _without_memory(buffers: Incomplete, what: str) -> NoMemoryError:
    return NoMemoryError(
        f"{what} was dropped when it arrived: there was no memory for its {buffers.size:,} bytes "
        f"({buffers.reason}). Send it in smaller parts, or give the receiving worker more memory"
    )


class _Loading(Protocol):
    @property
    def loads(self) -> Load[Any]: ...


def load_tensors(codec: _Loading, buffers: Sequence[Any], source: Source) -> list[Tensor | None]:
    """A codec's method that rebuilds tensors that its ``dump_tensors`` serialized.

    Raises:
        SerializationError: the message is malformed, or contains something else.
    """
    value = codec.loads({}, buffers, None, source)
    if type(value) is list and (
        _TENSORS.issuperset(map(type, value)) or all(isinstance(each, Tensor | None) for each in value)
    ):
        return value
    raise SerializationError(f"what worker '{source.name}' sent should be tensors")

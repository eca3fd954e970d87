"""A pickler that users may put in place of ours, or derive theirs from: bytes and a list of tensors.

``serialize(obj) -> (bytes, tensors)`` and ``deserialize(bytes, tensors) -> obj`` are what
``torch.distributed.rpc`` asks of a pickler. The tensors are those of the object itself, neither copied nor
taken apart, in the order in which the bytes refer to them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch

from rpc.serialization import pickler as messages

__all__ = ["PortablePickler", "PythonUDF", "ReplacementPickler", "received"]


class PythonUDF(NamedTuple):
    """What a replacement pickler is given to serialize: a call."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ReplacementPickler(Protocol):
    """What can replace the pickler of outgoing calls: see ``rpc.use_pickler``."""

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Turn an object into bytes and a list of tensors."""

    def deserialize(self, data: bytes, tensors: Sequence[torch.Tensor]) -> Any:
        """The reverse of ``serialize``."""


_PLACE: Final = bytearray()
"""Stands in the pickle where a tensor of the list belongs."""


class _TablePickler(messages.Pickler):
    """Puts tensors into a table instead of taking them apart."""

    host: messages.Pickler | None = None
    table: list[torch.Tensor]

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            self.table.append(obj)
            return received, (pickle.PickleBuffer(_PLACE),)
        return super().reducer_override(obj)

    def carry(self, obj: Any, carrier: Any) -> tuple[Any, ...]:
        if self.host is None:
            return super().carry(obj, carrier)
        return self.host.carry(obj, carrier)


def _stays(buffer: pickle.PickleBuffer) -> bool:
    return buffer.raw().obj is not _PLACE


def received(tensor: torch.Tensor) -> torch.Tensor:
    """What stands at a tensor's place in the bytes. Named in pickles."""
    return tensor


class PortablePickler:
    """Pickles by the rules of this package, into bytes and a list of tensors.

    It needs no running agent. Used inside ``__getstate__`` while a message is pickled, remote references
    travel with that message; used by itself, it refuses them.

    Example::

        pickler = PortablePickler()
        data, tensors = pickler.serialize({"weight": torch.ones(2)})
        assert pickler.deserialize(data, tensors)["weight"] is tensors[0]
    """

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Pickle ``obj``, leaving out its tensors.

        Returns:
            The bytes, and the tensors that belong to them.
        """
        stream = io.BytesIO()
        pickler = _TablePickler(stream, messages.PROTOCOL, buffer_callback=_stays)
        host = messages.sending.pickler
        if host is not None:
            pickler.host, pickler.to, pickler.trial = host, host.to, host.trial
        pickler.table = []
        pickler.dump(obj)
        return stream.getvalue(), pickler.table

    def deserialize(self, data: bytes, tensors: Sequence[torch.Tensor]) -> Any:
        """Unpickle what ``serialize`` made. The tensors become part of the object.

        Raises:
            FunctionNotFoundError: the bytes name a function or class that cannot be imported here.
            SerializationError: they cannot be unpickled for another reason.
        """
        from rpc.serialization.failures import reading

        with reading("what was serialized"):
            return pickle.loads(data, buffers=tensors)

"""A pickler that users may use in place of ours, or derive theirs from: it makes bytes and a list of tensors.

``serialize(obj) -> (bytes, tensors)`` and ``deserialize(bytes, tensors) -> obj`` are the interface of
picklers in ``torch.distributed.rpc``. The tensors are those of the object itself, neither copied nor taken
apart, in the order in which the bytes refer to them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import torch

from rpc.errors import RpcError
from rpc.runtime.interrupts import is_interruption
from rpc.serialization import pickler as messages
from rpc.serialization.failures import unreadable


class PythonUDF(NamedTuple):
    """A call, as it is passed to a replacement pickler."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ReplacementPickler(Protocol):
    """A replacement for the pickler of outgoing calls: see ``rpc.use_pickler``."""

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]: ...

    def deserialize(self, data: bytes, tensors: Sequence[torch.Tensor]) -> Any: ...


_PLACE: Final = bytearray()
"""Stands in the pickle for a tensor of the list."""


class _TablePickler(messages.Pickler):
    """Puts tensors into a table instead of taking them apart."""

    host: messages.Pickler | None = None
    table: list[torch.Tensor]
    own_reducers: Mapping[type, Callable[[Any], Any]]

    def reducer_override(self, obj: Any) -> Any:
        reduce = self.own_reducers.get(type(obj))
        if reduce is not None:
            return reduce(obj)
        if isinstance(obj, torch.Tensor):
            self.table.append(obj)
            return received, (pickle.PickleBuffer(_PLACE),)
        return super().reducer_override(obj)

    def carry(self, obj: Any, carrier: Any) -> tuple[Any, ...]:
        return super().carry(obj, carrier) if self.host is None else self.host.carry(obj, carrier)


def received(tensor: torch.Tensor) -> torch.Tensor:
    """Return the object for a tensor in the bytes. Named in pickles."""
    return tensor


class PortablePickler:
    """Pickles by the rules of this package, into bytes and a list of tensors. Needs no running agent.

    Attributes:
        reducers: for exact classes, functions that take the object and return what ``__reduce_ex__`` may
            return. To be set by derived classes.

    Example::

        pickler = PortablePickler()
        data, tensors = pickler.serialize({"weight": torch.ones(2)})
        assert pickler.deserialize(data, tensors)["weight"] is tensors[0]
    """

    reducers: Mapping[type, Callable[[Any], Any]] = MappingProxyType({})

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Pickle an object, leaving out its tensors; returns the bytes and the tensors that they refer to.

        If it is called inside ``__getstate__`` while a message is pickled, objects beside the pickle (remote
        references) travel with that message; elsewhere they are refused.
        """
        stream = io.BytesIO()
        pickler = _TablePickler(
            stream, messages.PROTOCOL, buffer_callback=lambda buffer: buffer.raw().obj is not _PLACE
        )
        host = messages.sending.pickler
        if host is not None:
            pickler.host, pickler.to, pickler.trial = host, host.to, host.trial
            pickler.owned = host.owned
        pickler.reducers = messages.Reducers() if host is None else host.reducers
        pickler.table = []
        pickler.own_reducers = self.reducers
        pickler.dump(obj)
        return stream.getvalue(), pickler.table

    def deserialize(self, data: bytes, tensors: Sequence[torch.Tensor]) -> Any:
        """Unpickle the result of ``serialize``. The tensors become part of the object.

        Raises:
            FunctionNotFoundError: the bytes name a function or class that cannot be imported here.
            SerializationError: they cannot be unpickled for another reason.
        """
        try:
            return pickle.loads(data, buffers=tensors)
        except RpcError:
            raise
        except Exception as error:
            if is_interruption(error):
                raise
            raise unreadable(error, "what was serialized") from error

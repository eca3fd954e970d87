"""The pickler: protocol 5, with one table that says how a type travels.

``reducer_override`` sees every object that is not a plain scalar or container. It looks up the object's
class in ``_reducers``, and after it the classes it derives from; what is found there reduces the object,
everything else is pickled as ever. Larger memory leaves the pickle as segments, in protocol 5's way.
"""

from __future__ import annotations

import copyreg
import enum
import io
import pickle
import threading
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, Final

import cloudpickle
import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.storage import TypedStorage, UntypedStorage

from rpc.errors import SerializationError, with_article
from rpc.serialization.carriers import (
    Carrier,
    arrived,
    receiving,
    register_kind,
    take_back,
)
from rpc.serialization.enums import reduce_enum
from rpc.serialization.functions import (
    reduce_class,
    reduce_function,
    reduce_method,
    reduce_operator,
    reduce_script_function,
    reduce_script_module,
)
from rpc.serialization.memory import INLINE_BYTES, is_borrowed, settle
from rpc.serialization.payload import TRACKED, Arrivals, Buffer, Destination, Payload
from rpc.serialization.tensor_kinds import reduce_constant, reduce_storage, reduce_tensor

__all__ = ["PROTOCOL", "Pickler", "Reducer", "dump", "load", "register_carrier", "register_reducer"]

PROTOCOL: Final = 5

Reducer = Callable[[Any, Any], Any]
"""Takes an object and the pickler; returns what ``__reduce_ex__`` may return, or NotImplemented."""


def _by_cloudpickle() -> dict[type, Reducer]:
    """The types that plain pickle refuses and that functions and classes going by value are made of.
    Open files stay refused.
    """
    table = cloudpickle.Pickler.dispatch_table
    kinds = set(table) - set(copyreg.dispatch_table) - {MethodType, io.TextIOWrapper}
    return {kind: _plainly(table[kind]) for kind in kinds if isinstance(kind, type)}


def _plainly(reduce: Callable[[Any], Any]) -> Reducer:
    return lambda obj, _: reduce(obj)


_reducers: dict[type, Reducer] = _by_cloudpickle() | {
    FunctionType: reduce_function,
    type: reduce_class,
    MethodType: reduce_method,
    enum.Enum: reduce_enum,
    torch.Tensor: reduce_tensor,
    UntypedStorage: reduce_storage,
    TypedStorage: reduce_storage,
    torch.dtype: reduce_constant,
    torch.layout: reduce_constant,
    torch.memory_format: reduce_constant,
    torch.qscheme: reduce_constant,
    torch.jit.ScriptFunction: reduce_script_function,
    torch.jit.ScriptModule: reduce_script_module,
    OpOverload: reduce_operator,
    OpOverloadPacket: reduce_operator,
}

_found: dict[type, Reducer | None] = {}
"""What looking up a class has found: a cache, so that each class is looked up once."""

_MAX_FOUND: Final = 4096


def register_reducer(kind: type, reduce: Callable[[Any], Any]) -> None:
    """Say how objects of a type travel in messages, without changing how they are pickled elsewhere.

    Args:
        kind: the type; types derived from it are meant too, unless they have a reducer of their own.
        reduce: takes the object and returns what ``__reduce_ex__`` may return, or NotImplemented to leave
            the object to plain pickle.

    Example::

        register_reducer(Connection, lambda connection: (Connection, (connection.url,)))
    """
    _reducers[kind] = _plainly(reduce)
    _found.clear()


def register_carrier(kind: type, carrier: Carrier) -> None:
    """Have objects of a type travel beside the pickle.

    Args:
        kind: the type; types derived from it are meant too.
        carrier: see ``Carrier``. It may carry several types.

    Raises:
        ValueError: another carrier has the same ``carrier.kind``.
    """
    register_kind(carrier)
    _reducers[kind] = lambda obj, pickler: pickler.carry(obj, carrier)
    _found.clear()


def _look_up(kind: type) -> Reducer | None:
    if len(_found) >= _MAX_FOUND:
        _found.clear()
    reducer = next((_reducers[base] for base in kind.__mro__ if base in _reducers), None)
    _found[kind] = reducer
    return reducer


class _Sending(threading.local):
    pickler: Pickler | None = None


sending = _Sending()
"""What this thread pickles at the moment."""


class Pickler(pickle.Pickler):
    """Pickles one message. Made by ``dump``, which also sets the attributes.

    Attributes:
        to: where the message goes; None if that is not known.
        carried: descriptors of what travels beside the pickle, by kind.
        trial: nothing will be sent: nothing departs.
        tracked: where tensors that require grad go, to be sent apart; None if they stay in the pickle.
    """

    to: Destination | None = None
    carried: dict[str, list[Any]] | None = None
    trial: bool = False
    tracked: list[torch.Tensor] | None = None
    _by_value: Any = None

    @property
    def by_value(self) -> Any:
        """The pickler of cloudpickle for this message: it knows which functions share their globals."""
        if self._by_value is None:
            self._by_value = cloudpickle.Pickler(io.BytesIO())
        return self._by_value

    def reducer_override(self, obj: Any) -> Any:
        """Called by pickle for every object that is no plain scalar or container."""
        kind = type(obj)
        try:
            reducer = _found[kind]
        except KeyError:
            reducer = _look_up(kind)
        if reducer is None:
            return NotImplemented
        return reducer(obj, self)

    def carry(self, obj: Any, carrier: Carrier) -> tuple[Any, ...]:
        """Have an object travel beside the pickle."""
        if self.trial:
            return arrived, (carrier.kind, 0)
        descriptor = carrier.depart(obj, self.to)
        if self.to is None:
            raise SerializationError(f"{with_article(type(obj))} can travel in messages between workers only")
        if self.carried is None:
            self.carried = {}
        descriptors = self.carried.setdefault(carrier.kind, [])
        descriptors.append(descriptor)
        return arrived, (carrier.kind, len(descriptors) - 1)


def dump(
    record: Any,
    to: Destination | None,
    *,
    prepare: Callable[[Any], Any] | None = None,
    trial: bool = False,
    tracked: list[torch.Tensor] | None = None,
) -> Payload:
    """Pickle one object.

    Args:
        record: the object.
        to: where it will be sent.
        prepare: makes what is pickled out of ``record``; what it pickles itself, with a
            ``PortablePickler``, counts as part of this message.
        trial: only find out whether it can be pickled.
        tracked: the tensors that require grad are put in here, and pickled apart, so that the receiver
            has them before it builds what they are part of: see ``load``.

    Raises:
        Exception: whatever pickling raises; what has departed by then is taken back.
    """
    stream = io.BytesIO()
    segments: list[Buffer] = [b""]
    borrowed: list[int] = []

    def leave(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes <= INLINE_BYTES:
            return True
        if is_borrowed(memory):
            borrowed.append(len(segments))
        segments.append(memory)
        return False

    pickler = Pickler(stream, PROTOCOL, buffer_callback=leave)
    pickler.to = to
    pickler.trial = trial
    pickler.tracked = tracked
    outer, sending.pickler = sending.pickler, pickler
    try:
        pickler.dump(record if prepare is None else prepare(record))
        segments[0] = stream.getvalue()
        header: dict[str, Any] = pickler.carried or {}
        if tracked:
            place = header[TRACKED] = len(segments)
            segments.append(b"")
            apart = io.BytesIO()
            pickler_apart = Pickler(apart, PROTOCOL, buffer_callback=leave)
            pickler_apart.to = to
            pickler_apart.dump(tuple([tensor.detach() for tensor in tracked]))
            segments[place] = apart.getvalue()
    except BaseException:
        if pickler.carried and to is not None:
            take_back(pickler.carried, to)
        raise
    finally:
        sending.pickler = outer
    return Payload(header, segments, borrowed)


def load(segments: Sequence[Any], arrivals: Arrivals | None) -> Any:
    """Unpickle one object. Whatever was pickled runs its code."""
    if arrivals is None:
        if len(segments) == 1:
            return pickle.loads(segments[0])
        return pickle.loads(segments[0], buffers=map(settle, segments[1:]))
    outer, receiving.arrivals = receiving.arrivals, arrivals
    try:
        return pickle.loads(segments[0], buffers=map(settle, segments[1:]))
    finally:
        receiving.arrivals = outer

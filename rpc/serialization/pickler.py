"""The pickler: protocol 5, with one table that defines how types travel.

``reducer_override`` sees every object that is not a plain scalar or container, and looks its class up in
``Reducers``; classes that are not found there are pickled as usual. Larger memory leaves the pickle as
buffers, as protocol 5 defines.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import io
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, MethodType
from typing import Any, Final, Protocol

import cloudpickle
import numpy as np
import torch
from torch.storage import TypedStorage, UntypedStorage

from rpc.errors import SerializationError, with_article
from rpc.runtime.interrupts import interruptible, protected
from rpc.runtime.torch_internals import OpOverload, OpOverloadPacket
from rpc.serialization.arrays import reduce_array
from rpc.serialization.carriers import Carrier, arrived, receiving
from rpc.serialization.exception_state import Partly, reduce_exception, reduce_partly
from rpc.serialization.functions import (
    reduce_importable,
    reduce_method,
    reduce_operator,
    reduce_script_function,
    reduce_script_module,
)
from rpc.serialization.memory import INLINE_BYTES, settle
from rpc.serialization.payload import (
    TRACKED,
    Arrivals,
    Buffer,
    Destination,
    Payload,
    Placement,
    Staging,
    Tracked,
)
from rpc.serialization.process_bound import reducer_of
from rpc.serialization.tensor_kinds import reduce_constant, reduce_storage, reduce_tensor
from rpc.serialization.tracked import Owned, note_module, note_optimizer, separate, tell_of_copies

PROTOCOL: Final = 5

Reducer = Callable[[Any, Any], Any]
"""Takes an object and the pickler; returns what ``__reduce_ex__`` may return, or NotImplemented."""

_STANDARD_ENUM: Final = (enum.Enum.__reduce_ex__, enum.Flag.__reduce_ex__)
_MAX_FOUND: Final = 4096


def plainly(reduce: Callable[[Any], Any]) -> Reducer:
    """Make a reducer of a function that does not need the pickler."""
    return lambda obj, _: reduce(obj)


def _reduce_enum(member: enum.Enum, _: Any) -> Any:
    """By value: CPython 3.11.0 to 3.11.3 reduce it by name, with ``getattr``, which safe mode
    cannot admit.
    """
    kind = type(member)
    return (kind, (member.value,)) if kind.__reduce_ex__ in _STANDARD_ENUM else NotImplemented


def _by_cloudpickle() -> dict[type, Reducer]:
    """Return the types that plain pickle refuses and that functions and classes sent by value consist of.
    Open files are still refused.
    """
    table = cloudpickle.Pickler.dispatch_table
    kinds = set(table) - set(copyreg.dispatch_table) - {MethodType, io.TextIOWrapper}
    return {kind: plainly(table[kind]) for kind in kinds if isinstance(kind, type)}


_BUILT_IN: Final[dict[type, Reducer]] = _by_cloudpickle() | {
    FunctionType: reduce_importable,
    type: reduce_importable,
    MethodType: reduce_method,
    enum.Enum: _reduce_enum,
    np.ndarray: reduce_array,
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
    torch.nn.Module: note_module,
    torch.optim.Optimizer: note_optimizer,
    BaseException: reduce_exception,
    Partly: reduce_partly,
}


class Reducers(dict[type, Reducer | None]):
    """How types travel, including derived types: filled in as types are looked up. From any thread."""

    def __init__(self) -> None:
        self._registered = dict(_BUILT_IN)

    def register(self, kind: type, reduce: Reducer) -> None:
        """Define how objects of a type travel, and of types derived from it, unless those are registered."""
        self._registered[kind] = reduce
        self.clear()

    def __missing__(self, kind: type) -> Reducer | None:
        if len(self) >= _MAX_FOUND:
            self.clear()
        registered = self._registered
        found = (registered.get(base) or reducer_of(base) for base in kind.__mro__)
        reducer = self[kind] = next(filter(None, found), None)
        return reducer


class Departing:
    """The interface of a message's writer to reducers."""

    reducers: Reducers
    to: Destination | None = None
    trial = False  # nothing will be sent, so no object departs
    tracked: Tracked = None  # collects tensors that require grad, if they do not stay in the message
    owned: Owned | None = None  # collects parameters of modules and optimizers
    carried: dict[str, tuple[Carrier, list[Any]]] | None = None  # by kind: its carrier, and the descriptors
    rebuilds_exceptions = False  # the receiver rebuilds exceptions from their state
    sends_chains = False  # exceptions are sent with their causes and contexts
    placement: Placement | None = None  # maps devices of tensors; None if device tensors cannot be sent
    staging: Staging | None = None  # of this message; None if device tensors are copied at once

    @functools.cached_property
    def links(self) -> dict[int, tuple[BaseException, bytes]]:
        """Pickles of causes and contexts of exceptions in this message, by id."""
        return {}

    @functools.cached_property
    def by_value(self) -> Any:
        """The pickler of cloudpickle for this message: it knows which functions share their globals."""
        return cloudpickle.Pickler(io.BytesIO())

    def measure(self, obj: Any) -> int:
        """Return the size in bytes of an object in a message."""
        return sum(map(len, dump(obj, self.to, self.reducers, trial=True).buffers))

    @protected  # departed objects are always recorded
    def carry(self, obj: Any, carrier: Carrier) -> tuple[Any, ...]:
        """Have an object travel beside the message."""
        if self.trial:
            return arrived, (carrier.kind, 0)
        descriptor = carrier.depart(obj, self.to)
        if self.to is None:
            raise SerializationError(f"{with_article(type(obj))} can travel in messages between workers only")
        if self.carried is None:
            self.carried = {}
        _, descriptors = self.carried.setdefault(carrier.kind, (carrier, []))
        descriptors.append(descriptor)
        return arrived, (carrier.kind, len(descriptors) - 1)


class Pickler(Departing, pickle.Pickler):
    """Pickles one message. Made by ``dump``, which also sets the attributes."""

    rebuilds_exceptions = True

    def reducer_override(self, obj: Any) -> Any:
        """Called by pickle for every object that is no plain scalar or container."""
        reducer = self.reducers[type(obj)]
        return NotImplemented if reducer is None else reducer(obj, self)

    def attempt(self, obj: Any) -> None:
        """Pickle an object without sending it, or raise the error that prevents it."""
        dump(obj, self.to, self.reducers, trial=True)

    def apart(self, obj: Any) -> bytes:
        """Return a pickle inside this message's pickle. If it cannot be read, the rest of the message still
        can.
        """
        stream = io.BytesIO()
        pickler = _Apart(stream, PROTOCOL)
        pickler.host, pickler.reducers, pickler.to, pickler.trial = self, self.reducers, self.to, self.trial
        pickler.placement = self.placement
        pickler.dump(obj)
        return stream.getvalue()


class _Apart(Pickler):
    """Pickles a part of a message. Objects beside it travel with the message."""

    host: Pickler

    def carry(self, obj: Any, carrier: Carrier) -> tuple[Any, ...]:
        return self.host.carry(obj, carrier)


class _Sending(threading.local):
    pickler: Pickler | None = None


sending = _Sending()
"""The message that this thread is pickling."""


@protected  # departed objects are either taken back or returned
def dump(
    record: Any,
    to: Destination | None,
    reducers: Reducers,
    *,
    prepare: Callable[[Any], Any] | None = None,
    trial: bool = False,
    tracked: Tracked = None,
    placement: Placement | None = None,
    alone: bool = False,
) -> Payload:
    """Pickle one object; if that raises, objects that have departed by then are taken back.

    Args:
        record: the object.
        to: the destination.
        reducers: define how types travel.
        prepare: makes the object to be pickled from ``record``; what it pickles itself, with a
            ``PortablePickler``, counts as part of this message.
        trial: only find out whether it can be pickled.
        tracked: collects the tensors that require grad, which are pickled separately: see ``tracked``.
        placement: maps devices of tensors.
        alone: device memory is sent in the message, and no objects beside it.
    """
    buffers: list[Buffer] = []
    staging = None if placement is None or trial else placement.staging(alone=alone)

    def leave(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes <= INLINE_BYTES and (staging is None or not staging.owns(memory)):
            return True
        buffers.append(memory)
        return False

    def pickler_to(stream: io.BytesIO) -> Pickler:
        pickler = Pickler(stream, PROTOCOL, buffer_callback=leave)
        pickler.reducers = reducers
        pickler.to = to
        pickler.placement, pickler.staging = placement, staging
        buffers.append(b"")  # to be replaced by its pickle
        return pickler

    stream = io.BytesIO()
    pickler = pickler_to(stream)
    pickler.trial = trial
    pickler.sends_chains = not trial
    pickler.tracked, pickler.owned = tracked, {}
    header: dict[str, Any] = {}
    outer, sending.pickler = sending.pickler, pickler
    try:
        _pickle(pickler, record, prepare)
        buffers[0] = stream.getvalue()
        place = len(buffers)
        if tracked:
            if pickler.carried is None:
                pickler.carried = {}
            stream = io.BytesIO()
            apart = pickler_to(stream)
            apart.carried = pickler.carried
            _pickle(apart, separate(tracked, pickler.owned))
            buffers[place] = stream.getvalue()
            header[TRACKED] = place
        if tracked is not None:
            tell_of_copies(pickler.owned)
        if pickler.carried:
            header |= {kind: descriptors for kind, (_, descriptors) in pickler.carried.items()}
        if staging is not None and not staging.begin():
            staging = None
    except BaseException:
        for carrier, descriptors in (pickler.carried or {}).values():
            carrier.take_back(descriptors, to)
        raise
    finally:
        sending.pickler = outer
    return Payload(header, buffers, staging=staging)


@interruptible
def _pickle(pickler: Pickler, record: Any, prepare: Callable[[Any], Any] | None = None) -> None:
    pickler.dump(record if prepare is None else prepare(record))


class Read(Protocol):
    """Reads a pickle: ``pickle.loads``, which runs any code that the pickle names, or a safer function."""

    def __call__(self, data: Any, /, *, buffers: Iterable[Any] = ()) -> Any: ...


def load(buffers: Sequence[Any], arrivals: Arrivals | None, read: Read) -> Any:
    """Read one pickle, the first of the buffers, with the other buffers and the objects that arrived beside
    it.
    """
    outer, receiving.arrivals = receiving.arrivals, arrivals
    try:
        return read(buffers[0], buffers=[settle(each) for each in buffers[1:]])
    finally:
        receiving.arrivals = outer

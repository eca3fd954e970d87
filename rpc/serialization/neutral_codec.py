"""The codec without pickle, between workers of which one is in safe mode: see ``neutral`` and ``safe``.

A value is sent as ``(value,)``. Failures are told by their headers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from rpc.errors import SerializationError
from rpc.runtime.interrupts import is_interruption
from rpc.serialization import neutral
from rpc.serialization.codecs import NEUTRAL, Args, Call, Function, Kwargs
from rpc.serialization.failures import cannot_call, cannot_send
from rpc.serialization.functions import name_of, resolve
from rpc.serialization.payload import Connect, Destination, Payload, Tracked
from rpc.serialization.pickle_codec import load_tensors, loader
from rpc.serialization.pickler import Read, Reducers
from rpc.serialization.safe import AllowList

__all__ = ["NeutralCodec"]

_QUICK: frozenset[type] = frozenset((type(None), bool, int, float))


class NeutralCodec:
    """See ``Codec``.

    Args:
        reducers: define how types travel.
        allow: the allow-list for reading; None admits whatever can be imported.
    """

    id = NEUTRAL

    def __init__(self, reducers: Reducers, allow: AllowList | None) -> None:
        self._reducers = reducers
        self._allow = allow
        self.read: Read = partial(neutral.read, allow)
        self.nothing: Sequence[Any] = neutral.dump((None,), None, reducers).buffers
        """The buffers of a message with the value None."""

    def dump_call(
        self, func: Function, args: Args, kwargs: Kwargs, to: Destination, *, tracked: Tracked = None
    ) -> Payload:
        """Serialize a call."""
        module, name = name_of(func, to) or (None, func)
        try:
            return neutral.dump((module, name, args, kwargs), to, self._reducers, tracked=tracked)
        except Exception as error:
            if is_interruption(error):
                raise
            reason = error
        try:
            raise cannot_call(reason, func, args, kwargs, to, lambda part: self._try(part, to))
        finally:
            del reason  # it refers to this frame, a cycle

    def _call_of(self, record: Any, connect: Connect | None) -> Call:
        module, name, args, kwargs = _record(record, 4)
        if type(args) is not tuple or type(kwargs) is not dict:
            raise SerializationError("the arguments of the call are malformed")
        if self._allow is not None:
            return self._allow.callee(module, name), args, kwargs
        return name if module is None else resolve(module, name), args, kwargs

    load_call = loader(_call_of, "a call from worker '{}'")

    def dumps(
        self, value: Any, to: Destination | None, *, what: object = None, tracked: Tracked = None
    ) -> Payload:
        """Serialize a value."""
        try:
            return neutral.dump((value,), to, self._reducers, tracked=tracked)
        except Exception as error:
            if is_interruption(error):
                raise
            reason = error
        try:
            raise cannot_send(reason, value, to, what, lambda part: self._try(part, to))
        finally:
            del reason  # it refers to this frame, a cycle

    def dump_quickly(self, value: Any) -> Payload | None:
        """Like ``PickleCodec.dump_quickly``."""
        return self.dumps(value, None) if type(value) in _QUICK else None

    def _value_of(self, record: Any, connect: Connect | None) -> Any:
        return _record(record, 1)[0]

    loads = loader(_value_of, "what worker '{}' sent")

    def dump_tensors(
        self, tensors: Sequence[Tensor | None], to: Destination, what: str, *, as_call: bool = False
    ) -> Payload:
        """Like ``PickleCodec.dump_tensors``."""
        return self.dumps([None if tensor is None else tensor.detach() for tensor in tensors], to, what=what)

    load_tensors = load_tensors

    def _try(self, part: Any, to: Destination | None) -> None:
        neutral.dump(part, to, self._reducers, trial=True)


def _record(record: Any, size: int) -> tuple[Any, ...]:
    if type(record) is not tuple or len(record) != size:
        raise SerializationError("a message is not a record of its codec")
    return record

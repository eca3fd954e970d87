"""The codec that every worker has: pickles, with the memory of tensors in separate buffers. The hot path.

The pickle, buffer 0, is a tuple:

- for a call: ``(module, name, args, kwargs, tensors)``; ``(None, func, args, kwargs, ())`` if the function is
  sent by value or is another object; ``(None, None, data, table, ())`` if a replacement pickler made these
  two;
- for a value: ``(value, tensors)``.

Most arguments and values are scalars, texts and usual tensors. Then no Python code runs for each object that
is pickled: tensors are taken out first, and C's plain ``pickle.dumps`` does the rest. ``tensors`` has the
position or keyword of each (whose place contains None) and its arguments of ``dense``. If the value itself is
a tensor, ``tensors`` is its arguments of ``dense``.
"""

from __future__ import annotations

import functools
import logging
import pickle
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor

from rpc.errors import NoMemoryError, RpcError, SerializationError
from rpc.runtime.interrupts import is_interruption
from rpc.serialization.codecs import PICKLE, Args, Call, Function, Kwargs, Load
from rpc.serialization.failures import cannot_call, cannot_send, unreadable
from rpc.serialization.functions import name_of, resolve
from rpc.serialization.payload import (
    TRACKED,
    Arrivals,
    Connect,
    Destination,
    Payload,
    Placement,
    Source,
    Tracked,
)
from rpc.serialization.pickler import PROTOCOL, Read, Reducers, dump, load
from rpc.serialization.placement import of_answers, of_calls
from rpc.serialization.portable import PortablePickler, PythonUDF
from rpc.serialization.settings import Settings
from rpc.serialization.tensors import (
    COMPUTED,
    INLINE_LIMITS,
    NUMBERS,
    SCALARS,
    SEQUENCES,
    SHORT,
    SMALL_BYTES,
    WITH_GRAD,
    Taken,
    dense,
    fill_in,
    is_short_sequence,
    plain,
    take_tensors,
)
from rpc.serialization.tracked import rebuilt
from rpc.wire.reassembly import Incomplete

__all__ = ["PickleCodec", "load_tensors", "loader"]

logger = logging.getLogger(__name__)

_TENSORS: Final = frozenset((Tensor, NoneType))

_inference = torch.is_inference_mode_enabled
_pickle = pickle.dumps
_raw = pickle.PickleBuffer.raw
_NONE: Final = _pickle((None, ()), PROTOCOL)
_INLINE_ALONE: Final = INLINE_LIMITS[1]
_NOTHING_TAKEN: Final[Taken] = ((), {}, ())


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


class PickleCodec:
    """See ``Codec``.

    Args:
        reducers: define how types travel.
        settings: the user's settings, such as a replacement pickler.
    """

    id = PICKLE

    nothing: Sequence[Any] = (_NONE,)
    """The buffers of a message with the value None."""
    read: Read = staticmethod(pickle.loads)

    def __init__(self, reducers: Reducers, settings: Settings) -> None:
        self._reducers = reducers
        self._settings = settings

    def dump_call(
        self, func: Function, args: Args, kwargs: Kwargs, to: Destination, *, tracked: Tracked = None
    ) -> Payload:
        """Serialize a call."""
        record: Any
        replacement = self._settings.pickler
        if replacement is None:
            named = name_of(func, to)
            if named is not None:
                module, name = named
                taken = take_tensors(args, kwargs, tracked) if args or kwargs else _NOTHING_TAKEN
                if taken is not None:
                    buffers: list[Any] = []
                    pickled = _pickle((module, name, *taken), PROTOCOL, buffer_callback=buffers.append)
                    return Payload({}, [pickled, *map(_raw, buffers)])
                record = (module, name, args, kwargs, ())
            else:
                record = (None, func, args, kwargs, ())
        else:
            record = PythonUDF(func, args, kwargs)
        prepare = None if replacement is None else lambda call: (None, None, *replacement.serialize(call), ())
        return self._dump_record(record, (func, args, kwargs), to, tracked, prepare)

    def _dump_record(
        self,
        record: Any,
        call: Call,
        to: Destination,
        tracked: Tracked,
        prepare: Callable[[Any], Any] | None = None,
    ) -> Payload:
        """Serialize the record of a call like any other object."""
        placement = of_calls(to)
        try:
            return dump(record, to, self._reducers, prepare=prepare, tracked=tracked, placement=placement)
        except Exception as error:
            if is_interruption(error):
                raise
            reason = error
        # After the handler, so that neither error becomes the other's context.
        try:
            raise cannot_call(reason, *call, to, lambda part: self._try(part, to, placement))
        finally:
            del reason  # it refers to this frame, a cycle

    def _call_of(self, record: Any, connect: Connect | None) -> Call:
        module, name, args, kwargs, tensors = record
        if module is not None:
            func = resolve(module, name)
        elif name is not None:
            func = name
        else:
            data, table = args, kwargs
            pickler = self._settings.pickler or PortablePickler()
            func, args, kwargs = pickler.deserialize(data, table)
            return func, tuple(args or ()), dict(kwargs or {})
        if tensors:
            args = list(args)
            fill_in(args, kwargs, tensors, connect)
        return func, tuple(args), kwargs

    load_call = loader(_call_of, "a call from worker '{}'")

    def dumps(
        self,
        value: Any,
        to: Destination | None,
        *,
        what: object = None,
        tracked: Tracked = None,
        as_call: bool = False,
        alone: bool = False,
        whole: bool = False,
    ) -> Payload:
        """Serialize a value; ``as_call``: device tensors are placed as in calls; ``alone``: no objects travel
        beside it; ``whole``: tensors are not taken out of it.
        """
        kind = type(value)
        if kind in SCALARS or (kind in SEQUENCES and is_short_sequence(value)):
            return Payload({}, [_NONE if value is None else _pickle((value, ()), PROTOCOL)])
        try:
            if kind is Tensor and not whole:
                usual = None if value.__dict__ else plain(value, _INLINE_ALONE)
                if usual is not None:
                    if tracked is not None and len(usual) == WITH_GRAD:
                        tracked.append(value)
                    if type(usual[2]) is bytes:  # its elements are copied
                        return Payload({}, [_pickle((None, usual), PROTOCOL)])
                    return _with_buffers((None, usual))
            elif kind in SEQUENCES and not whole and (len(value) <= SHORT or type(value[0]) in _TENSORS):
                taken = take_tensors(value, {}, tracked)
                if taken is not None:
                    items, _, tensors = taken
                    return _with_buffers((items if kind is list else tuple(items), tensors))
            placement = of_calls(to) if as_call else of_answers(to)
            record = _record(value, tracked)
            return dump(record, to, self._reducers, tracked=tracked, placement=placement, alone=alone)
        except Exception as error:
            if is_interruption(error):
                raise
            reason = error
        placement = of_calls(to) if as_call else of_answers(to)
        try:
            raise cannot_send(reason, value, to, what, lambda part: self._try(part, to, placement))
        finally:
            del reason  # it refers to this frame, a cycle

    def dump_quickly(self, value: Any) -> Payload | None:
        """Serialize a small value without running user code; None if that is impossible.

        May be called on the agent's loop.
        """
        kind = type(value)
        if kind in NUMBERS or ((kind is str or kind is bytes) and len(value) <= SMALL_BYTES):
            return self.dumps(value, None)
        try:
            if kind is Tensor and not value.__dict__ and value.is_cpu and value.nbytes <= SMALL_BYTES:
                usual = plain(value)
                return None if usual is None else _with_buffers((None, usual))
        except RuntimeError:
            pass  # some unusual kind
        return None

    def dump_tensors(
        self, tensors: Sequence[Tensor | None], to: Destination, what: str, *, as_call: bool = False
    ) -> Payload:
        """Serialize some tensors, such as gradients. One that occurs twice arrives as two.

        Args:
            tensors: tensors of any kind, or None.
            to: the destination.
            what: a text that names them, for error messages.
            as_call: see ``dumps``.

        Raises:
            SerializationError: one of them cannot be sent.
        """
        taken = take_tensors(list(tensors), {}, gradients=True)
        if taken is not None:
            return _with_buffers((taken[0], taken[2]))
        seen: set[int] = set()
        distinct: list[Tensor | None] = []
        for tensor in tensors:
            distinct.append(tensor.detach() if tensor is not None and id(tensor) in seen else tensor)
            seen.add(id(tensor))
        return self.dumps(distinct, to, what=what, as_call=as_call, alone=True)

    def _value_of(self, record: Any, connect: Connect | None) -> Any:
        value, tensors = record
        if not tensors or tensors == COMPUTED:
            if tensors and connect is None:
                _tell_of_lost_graph()
            return value
        if value is None:
            if connect is None or len(tensors) < WITH_GRAD:
                if len(tensors) == WITH_GRAD and tensors[3] == COMPUTED:
                    _tell_of_lost_graph()
                return dense(*tensors)
            return connect([dense(*tensors[:3])])[0]
        items = list(value)
        fill_in(items, {}, tensors, connect)
        return items if type(value) is list else tuple(items)

    loads = loader(_value_of, "what worker '{}' sent")

    load_tensors = load_tensors

    def _try(self, part: Any, to: Destination | None, placement: Placement) -> None:
        dump(part, to, self._reducers, trial=True, placement=placement)


def _record(value: Any, tracked: Tracked) -> tuple[Any, Any]:
    """Return what is sent of a value as a whole; for ``_value_of``."""
    lost = tracked is None and type(value) is Tensor and value.grad_fn is not None
    return value, COMPUTED if lost else ()


@functools.cache
def _tell_of_lost_graph() -> None:
    """Warn once in a process that gradients will not flow."""
    logger.warning(
        "the answer to a call was computed from tensors that require grad, but the call was made outside of "
        "dist_autograd.context(): no gradients will flow back through it. Make the call in a context; or, if "
        "no gradients are wanted, compute under torch.no_grad()"
    )


def _with_buffers(record: tuple[Any, ...]) -> Payload:
    buffers: list[Any] = []
    pickled = _pickle(record, PROTOCOL, buffer_callback=buffers.append)
    return Payload({}, [pickled, *map(_raw, buffers)])

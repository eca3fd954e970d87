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
import itertools
import logging
import pickle
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, Final

import torch
from torch import Tensor

from rpc.runtime.interrupts import is_interruption
from rpc.serialization import loading
from rpc.serialization.codecs import PICKLE, Args, Call, Function, Kwargs
from rpc.serialization.failures import cannot_call, cannot_send
from rpc.serialization.functions import name_of, resolve
from rpc.serialization.loading import loader
from rpc.serialization.memory import inline_limit
from rpc.serialization.payload import Connect, Destination, Payload, Placement, Tracked
from rpc.serialization.pickler import PROTOCOL, Read, Reducers, dump
from rpc.serialization.placement import of_answers, of_calls
from rpc.serialization.portable import PortablePickler, PythonUDF
from rpc.serialization.settings import Settings
from rpc.serialization.tensors import COMPUTED, dense, plain

logger = logging.getLogger(__name__)

_NUMBERS: Final = frozenset((NoneType, bool, int, float, complex))
_SCALARS: Final = _NUMBERS | {str, bytes}
_SEQUENCES: Final = frozenset((list, tuple))
_TENSORS: Final = frozenset((Tensor, NoneType))
_SHORT: Final = 64
_QUICK_BYTES: Final = 1024
_WITH_GRAD: Final = 4
"""Number of arguments of ``dense`` for a tensor that requires grad."""

_pickle = pickle.dumps
_raw = pickle.PickleBuffer.raw
_NONE: Final = _pickle((None, ()), PROTOCOL)
_INLINE: Final = [inline_limit(count) for count in range(_SHORT + 1)]
_INLINE_ALONE: Final = _INLINE[1]

Taken = tuple[Sequence[Any], dict[str, Any], Sequence[Any]]
"""Arguments with None in place of tensors, and the tensors: positions or keywords, and arguments of
``dense``.
"""

_NOTHING_TAKEN: Final[Taken] = ((), {}, ())


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
                taken = _take_tensors(args, kwargs, tracked) if args or kwargs else _NOTHING_TAKEN
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
            self._fill_in(args, kwargs, tensors, connect)
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
        if kind in _SCALARS or (kind in _SEQUENCES and _is_short_sequence(value)):
            return Payload({}, [_NONE if value is None else _pickle((value, ()), PROTOCOL)])
        try:
            if kind is Tensor and not whole:
                usual = None if value.__dict__ else plain(value, _INLINE_ALONE)
                if usual is not None:
                    if tracked is not None and len(usual) == _WITH_GRAD:
                        tracked.append(value)
                    if type(usual[2]) is bytes:  # its elements are copied
                        return Payload({}, [_pickle((None, usual), PROTOCOL)])
                    return _with_buffers((None, usual))
            elif kind in _SEQUENCES and not whole and (len(value) <= _SHORT or type(value[0]) in _TENSORS):
                taken = _take_tensors(value, {}, tracked)
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
        if kind in _NUMBERS or ((kind is str or kind is bytes) and len(value) <= _QUICK_BYTES):
            return self.dumps(value, None)
        try:
            if kind is Tensor and not value.__dict__ and value.is_cpu and value.nbytes <= _QUICK_BYTES:
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
        taken = _take_tensors(list(tensors), {}, gradients=True)
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
            if connect is None or len(tensors) < _WITH_GRAD:
                if len(tensors) == _WITH_GRAD and tensors[3] == COMPUTED:
                    _tell_of_lost_graph()
                return dense(*tensors)
            return connect([dense(*tensors[:3])])[0]
        items = list(value)
        self._fill_in(items, {}, tensors, connect)
        return items if type(value) is list else tuple(items)

    loads = loader(_value_of, "what worker '{}' sent")

    load_tensors = loading.load_tensors

    def _try(self, part: Any, to: Destination | None, placement: Placement) -> None:
        dump(part, to, self._reducers, trial=True, placement=placement)

    def _fill_in(
        self, items: list[Any], words: dict[str, Any], tensors: Sequence[Any], connect: Connect | None
    ) -> None:
        """Put the tensors that ``_take_tensors`` took out of a message back in their places."""
        rebuild: Any = dense
        with_grad: list[tuple[Any, Any]] = []
        values: list[Tensor] = []
        for place, usual in tensors:
            into: Any = words if type(place) is str else items
            if connect is None or len(usual) < _WITH_GRAD:
                into[place] = rebuild(*usual)
            else:
                with_grad.append((into, place))
                values.append(rebuild(*usual[:3]))
        if connect is not None and values:
            for (into, place), tensor in zip(with_grad, connect(values), strict=True):
                into[place] = tensor


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


def _without_gaps(tensor: Tensor) -> Any:
    """Return the arguments of ``dense`` for a small tensor with gaps or overlaps, such as the gradient of a
    sum.
    """
    usual = not tensor.__dict__ and tensor.layout is torch.strided and not tensor.is_nested
    return plain(tensor.contiguous()) if usual and tensor.nbytes <= _QUICK_BYTES else None


def _take_tensors(
    args: Sequence[Any], kwargs: dict[str, Any], tracked: Tracked = None, gradients: bool = False
) -> Taken | None:
    """Take usual tensors out of arguments that are otherwise scalars; None if there is anything else. Small
    ``gradients`` need not arrive with their gaps, and one that occurs twice may arrive as two.
    """
    tensors: list[Any] = []
    taken: list[Tensor] = []
    items, words = list(args), dict(kwargs)
    inline = _INLINE[min(len(args) + len(kwargs), _SHORT)]
    place: Any
    try:
        for place, value in itertools.chain(enumerate(args), kwargs.items()):
            kind = type(value)
            if kind is Tensor:
                usual = None if value.__dict__ else plain(value, inline)
                if usual is None and gradients:
                    usual = _without_gaps(value)
                if usual is None:
                    return None
                tensors.append((place, usual))
                taken.append(value)
                (words if type(place) is str else items)[place] = None
            elif kind not in _SCALARS and not (kind in _SEQUENCES and _is_short_sequence(value)):
                return None
    except RuntimeError:
        return None  # a tensor inside a torch.func transform; the slow path reports which
    if len(taken) > 1 and not gradients and len(set(map(id, taken))) < len(taken):
        return None  # one tensor twice must arrive as one: the pickler's memo ensures it
    if tracked is not None:
        tracked += [tensor for tensor in taken if tensor.requires_grad]
    return items, words, tensors


def _is_short_sequence(value: Any) -> bool:
    """Whether a list or tuple has only scalars, and so few that checking each costs less than a pickler."""
    return len(value) <= _SHORT and _SCALARS.issuperset(map(type, value))


def _with_buffers(record: tuple[Any, ...]) -> Payload:
    buffers: list[Any] = []
    pickled = _pickle(record, PROTOCOL, buffer_callback=buffers.append)
    return Payload({}, [pickled, *map(_raw, buffers)])

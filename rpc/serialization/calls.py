"""Calls and their results: the hot path.

Segment 0 of a call is the pickle of a tuple, whose length tells what it is:

====== ====================================  =======================================================
length fields                                what
====== ====================================  =======================================================
2      data, tensors                         serialized by a replacement pickler
3      func, args, kwargs                    the function goes by value, or is an object of some kind
4      module, name, args, kwargs            the function goes by name
5      module, name, args, kwargs, tensors   the same; ``tensors`` have been taken out of the arguments
====== ====================================  =======================================================

Any other object, such as a result, is a tuple of one; a bare tensor is the arguments of ``tensors.dense``.

Most arguments are scalars, texts and usual tensors. Then no Python code runs for each object that is
pickled: tensors are taken out of the arguments first, and C's plain ``pickle.dumps`` does the rest.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from types import BuiltinFunctionType
from typing import Any, Final

import cloudpickle
import torch
from torch import Tensor

from rpc.errors import RpcError
from rpc.serialization.failures import cannot_call, cannot_send, unreadable
from rpc.serialization.functions import MAIN_NAMES, builtin_names, name_of, resolve
from rpc.serialization.memory import inline_limit
from rpc.serialization.payload import TRACKED, Arrivals, Buffer, Connect, Destination, Payload, Source
from rpc.serialization.pickler import PROTOCOL, dump, load
from rpc.serialization.portable import PortablePickler, PythonUDF, ReplacementPickler
from rpc.serialization.safe import AllowList
from rpc.serialization.tensors import dense, plain
from rpc.serialization.tracked import rebuilt

__all__ = ["Call", "dump_call", "dump_quickly", "dumps", "fill_in", "load_call", "loads"]

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, its positional and its keyword arguments."""

_NUMBERS: Final = frozenset((type(None), bool, int, float, complex))
_SCALARS: Final = frozenset((type(None), bool, int, float, complex, str, bytes))

_SEQUENCES: Final = frozenset((list, tuple))
_SHORT: Final = 64
_QUICK_BYTES: Final = 1024
_WITH_GRAD: Final = 4
"""So many arguments ``dense`` gets for a tensor that requires grad."""

_inference = torch.is_inference_mode_enabled
_modules = sys.modules
_pickle = pickle.dumps
_unpickle = pickle.loads
_registered_by_value = cloudpickle.list_registry_pickle_by_value


def dump_call(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    to: Destination,
    *,
    pickler: ReplacementPickler | None = None,
    tracked: list[Tensor] | None = None,
) -> Payload:
    """Serialize a call.

    Args:
        func: anything that can be called: see ``rpc.serialization.functions`` for how it travels.
        args: its positional arguments.
        kwargs: its keyword arguments.
        to: where it goes.
        pickler: what the user has put in place of our pickler.
        tracked: a list for those tensors among the arguments that require grad, in an order that the
            receiver finds again; None if nobody wants to know.

    Raises:
        SerializationError: something cannot be sent; names which argument, its type and why. Nothing has
            departed then.
        RpcError: an argument travels beside the pickle and refuses, for a reason of its own.

    Example::

        payload = dump_call(torch.add, (x, 1), {}, peer)
        ...  # payload.header and payload.buffers reach the other side
        arrivals = adopt(header, peer)
        func, args, kwargs = load_call(header, segments, arrivals, peer)
    """
    if pickler is not None:
        return _dump_replaced(func, args, kwargs, to, pickler, tracked)
    try:
        if type(func) is BuiltinFunctionType:
            module, name = builtin_names[func]
        else:
            module, name = func.__module__, func.__qualname__
        found = _modules[module].__dict__.get(name) is func and module not in MAIN_NAMES
    except Exception:  # an object may do anything when it is asked for its name
        found = False
    if not found or _registered_by_value():
        named = name_of(func, to)
        if named is None:
            return _dump_any_call((func, args, kwargs), func, args, kwargs, to, tracked)
        module, name = named
    if not args and not kwargs:
        return Payload({}, [_pickle((module, name, (), {}), PROTOCOL)])
    try:
        simple = _take_tensors(args, kwargs, tracked)
    except RuntimeError:
        simple = None  # a tensor inside a torch.func transform; the slow way says which
    if simple is None:
        return _dump_any_call((module, name, args, kwargs), func, args, kwargs, to, tracked)
    places, words, tensors = simple
    if tensors is None:
        return Payload({}, [_pickle((module, name, places, words), PROTOCOL)])
    return _with_buffers((module, name, places, words, tensors))


def _take_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], tracked: list[Tensor] | None
) -> tuple[Sequence[Any], dict[str, Any], list[Any] | None] | None:
    """Take usual tensors out of arguments that are otherwise scalars; None if there is anything else.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        tracked: as for ``dump_call``; filled only if this succeeds.

    Returns:
        The arguments with None where a tensor was, and the tensors: their places (position or keyword),
        and the arguments of ``dense``.
    """
    tensors: list[Any] | None = None
    seen: set[int] = set()
    inline = inline_limit(len(args) + len(kwargs))
    places: Any = args
    words = kwargs
    place: Any
    for place, value in enumerate(args):
        kind = type(value)
        if kind is Tensor and not value.__dict__:
            usual = plain(value, inline)
            if usual is None or id(value) in seen:
                return None  # one tensor twice must arrive as one: the pickler's memo sees to it
            if tensors is None:
                tensors = []
                places = list(args)
            seen.add(id(value))
            places[place] = None
            tensors.append((place, usual))
        elif kind not in _SCALARS and not (kind in _SEQUENCES and _is_short_sequence(value)):
            return None
    if kwargs:
        for word, value in kwargs.items():
            kind = type(value)
            if kind is Tensor and not value.__dict__:
                usual = plain(value, inline)
                if usual is None or id(value) in seen:
                    return None
                seen.add(id(value))
                if tensors is None:
                    tensors = []
                if words is kwargs:
                    words = dict(kwargs)
                words[word] = None
                tensors.append((word, usual))
            elif kind not in _SCALARS and not (kind in _SEQUENCES and _is_short_sequence(value)):
                return None
    if tracked is not None and tensors is not None:
        for place, usual in tensors:
            if len(usual) == _WITH_GRAD:
                tracked.append(args[place] if type(place) is int else kwargs[place])
    return places, words, tensors


def _is_short_sequence(value: Any) -> bool:
    """Whether a list or tuple is of scalars, and so short that a look at each costs less than a pickler."""
    return len(value) <= _SHORT and _SCALARS.issuperset(map(type, value))


def _with_buffers(record: tuple[Any, ...]) -> Payload:
    buffers: list[pickle.PickleBuffer] = []
    segments: list[Buffer] = [_pickle(record, PROTOCOL, buffer_callback=buffers.append)]
    if not buffers:
        return Payload({}, segments)
    segments += map(pickle.PickleBuffer.raw, buffers)
    return Payload({}, segments, range(1, len(segments)))


def _dump_any_call(
    record: tuple[Any, ...],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    to: Destination,
    tracked: list[Tensor] | None,
) -> Payload:
    try:
        return dump(record, to, tracked=tracked)
    except Exception as error:
        reason = error
    raise cannot_call(reason, func, args, kwargs, to)


def _dump_replaced(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    to: Destination,
    pickler: ReplacementPickler,
    tracked: list[Tensor] | None,
) -> Payload:
    call = PythonUDF(func, args, kwargs)
    try:
        return dump(call, to, prepare=pickler.serialize, tracked=tracked)
    except Exception as error:
        reason = error
    raise cannot_call(reason, func, args, kwargs, to)


def load_call(
    header: dict[str, Any],
    segments: Sequence[Any],
    arrivals: Arrivals | None,
    source: Source,
    *,
    allow: AllowList | None = None,
    pickler: ReplacementPickler | None = None,
    connect: Connect | None = None,
) -> Call:
    """Rebuild a call.

    Args:
        header: the message's header.
        segments: buffers that belong to the receiver now; large tensors are made over their memory.
        arrivals: what ``adopt`` made of the header.
        source: who sent it.
        allow: read it with this allow-list ("safe"); without, the pickle may run any code.
        pickler: what reads calls that a replacement pickler has serialized, if not ours.
        connect: makes those tensors that the sender put into ``tracked`` part of a graph here, in that
            order; without, they are leaves that require grad.

    Raises:
        FunctionNotFoundError: the function, or a class among the arguments, cannot be imported here.
        SerializationError: the pickle cannot be read, or the allow-list does not admit something in it.
    """
    if _inference():
        with torch.inference_mode(False):  # a received tensor is as it was sent, whoever reads it
            return load_call(
                header, segments, arrivals, source, allow=allow, pickler=pickler, connect=connect
            )
    try:
        if TRACKED in header:
            read = load if allow is None else allow.read
            segments, arrivals = rebuilt(header, segments, arrivals, connect, read)
        if allow is not None:
            return allow.load_call(segments, arrivals, connect)
        simple = arrivals is None and len(segments) == 1
        record = _unpickle(segments[0]) if simple else load(segments, arrivals)
        count = len(record)
        if count == 3:
            func, args, kwargs = record
            return func, args, kwargs
        if count == 2:
            func, args, kwargs = (pickler or PortablePickler()).deserialize(*record)
            return func, tuple(args or ()), dict(kwargs or {})
        module, name, args, kwargs = record[:4]
        try:
            func = _modules[module].__dict__[name]
        except KeyError:
            func = None
        if func is None:
            func = resolve(module, name)  # out here, so that its error has no context
        return fill_in(func, args, kwargs, record[4], connect) if count == 5 else (func, args, kwargs)
    except RpcError:
        raise
    except Exception as error:
        raise unreadable(error, f"a call from worker '{source.name}'") from error


def fill_in(
    func: Any,
    places: Any,
    kwargs: dict[str, Any],
    tensors: Sequence[Any],
    connect: Connect | None = None,
    rebuild: Callable[..., Tensor] = dense,
) -> Call:
    """Put tensors back where ``_take_tensors`` took them from."""
    args = list(places)
    for place, tensor in _rebuild_all(tensors, connect, rebuild):
        if type(place) is int:
            args[place] = tensor
        else:
            kwargs[place] = tensor
    return func, tuple(args), kwargs


def _rebuild_all(
    tensors: Sequence[Any], connect: Connect | None, rebuild: Callable[..., Tensor]
) -> Iterable[tuple[Any, Tensor]]:
    if connect is None:
        return [(place, rebuild(*usual)) for place, usual in tensors]
    plain_ones: list[tuple[Any, Tensor]] = []
    places: list[Any] = []
    tracked: list[Tensor] = []
    for place, usual in tensors:
        if len(usual) == _WITH_GRAD:
            places.append(place)
            tracked.append(rebuild(*usual[:3]))
        else:
            plain_ones.append((place, rebuild(*usual)))
    if tracked:
        plain_ones += zip(places, connect(tracked), strict=True)
    return plain_ones


_NONE: Final = _pickle((None,), PROTOCOL)
_INLINE_ALONE: Final = inline_limit(1)


def dumps(
    obj: Any, to: Destination | None, *, what: object = None, tracked: list[Tensor] | None = None
) -> Payload:
    """Serialize any object.

    Args:
        obj: the object.
        to: where it goes; None if that is not known, and then what ``__main__`` defines goes by value and
            nothing can travel beside the pickle.
        what: for error messages: a text that names the object, or the function whose result it is.
        tracked: as for ``dump_call``.

    Raises:
        SerializationError: it cannot be sent; says which part of it, of which type, and why.
        RpcError: a part of it travels beside the pickle and refuses, for a reason of its own.
    """
    kind = type(obj)
    if kind in _SCALARS or (kind in _SEQUENCES and _is_short_sequence(obj)):
        return Payload({}, [_NONE if obj is None else _pickle((obj,), PROTOCOL)])
    try:
        if kind is Tensor and not obj.__dict__:
            usual = plain(obj, _INLINE_ALONE)
            if usual is not None:
                if tracked is not None and len(usual) == _WITH_GRAD:
                    tracked.append(obj)
                return _with_buffers(usual)
        return dump((obj,), to, tracked=tracked)
    except Exception as error:
        reason = error
    raise cannot_send(reason, obj, to, what)  # out here, so that no error is the other's context


def dump_quickly(obj: Any) -> Payload | None:
    """Serialize an object that is small, and such that none of the user's code takes part; None if it isn't.

    May be called on the agent's loop.
    """
    kind = type(obj)
    try:
        if kind in _NUMBERS or ((kind is str or kind is bytes) and len(obj) <= _QUICK_BYTES):
            return Payload({}, [_NONE if obj is None else _pickle((obj,), PROTOCOL)])
        if kind is Tensor and not obj.__dict__ and obj.is_cpu and obj.nbytes <= _QUICK_BYTES:
            usual = plain(obj)
            payload = None if usual is None else _with_buffers(usual)
            return payload if payload is not None and len(payload.buffers) == 1 else None
    except RuntimeError:
        pass  # a tensor of some unusual kind
    return None


def loads(
    header: dict[str, Any],
    segments: Sequence[Any],
    arrivals: Arrivals | None,
    source: Source,
    *,
    allow: AllowList | None = None,
    connect: Connect | None = None,
) -> Any:
    """Rebuild what ``dumps`` serialized; arguments and errors as for ``load_call``."""
    if _inference():
        with torch.inference_mode(False):
            return loads(header, segments, arrivals, source, allow=allow, connect=connect)
    try:
        if TRACKED in header:
            read = load if allow is None else allow.read
            segments, arrivals = rebuilt(header, segments, arrivals, connect, read)
        if allow is not None:
            return allow.load(segments, arrivals, connect)
        simple = arrivals is None and len(segments) == 1
        record = _unpickle(segments[0]) if simple else load(segments, arrivals)
        if len(record) == 1:
            return record[0]
        if connect is not None and len(record) == _WITH_GRAD:
            return connect([dense(*record[:3])])[0]
        return dense(*record)
    except RpcError:
        raise
    except Exception as error:
        raise unreadable(error, f"what worker '{source.name}' sent") from error

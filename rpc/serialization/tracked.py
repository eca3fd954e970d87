"""Tensors that require grad, if the receiver makes them part of a graph of its own.

The receiver must have all of them before it builds the object that contains them, as one node of its graph
has all of them as outputs. So they are pickled separately: in the main pickle each is a number, as if it
travelled beside it. Calls and results that consist of usual tensors only need no second pickle
(``pickle_codec``).

A parameter arrives as a separate parameter, since modules consist of them. One that is itself an argument of
a call, or in a list, tuple or dict there, does not belong to a module that is sent: a tensor replaces it
(``stand_ins``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from rpc.errors import SerializationError
from rpc.serialization.carriers import arrived, receiving
from rpc.serialization.memory import settle
from rpc.serialization.payload import TRACKED, Arrivals, Connect

_NO_PARAMETERS: Final = frozenset((Tensor, int, float, bool, str, bytes, type(None)))
"""Types of usual arguments."""


def is_tracked(tensor: Tensor) -> bool:
    """Whether a tensor stays part of the sender's graph: any that requires grad, other than a parameter,
    which arrives as a separate parameter.
    """
    return tensor.requires_grad and not isinstance(tensor, Parameter)


def stand_ins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with each parameter replaced by a tensor computed from it, so that
    gradients of that tensor flow to the parameter. Nothing changes if gradients are disabled.
    """
    if not torch.is_grad_enabled():
        return args, kwargs
    made: dict[int, Any] = {}
    if not _NO_PARAMETERS.issuperset(map(type, args)):
        args = tuple([_stand_in(value, made) for value in args])
    if kwargs:
        kwargs = {word: _stand_in(value, made) for word, value in kwargs.items()}
    return args, kwargs


def _stand_in(value: Any, made: dict[int, Any]) -> Any:
    """Return the replacement of an argument: itself, unless it is a parameter or contains one."""
    kind = type(value)
    if kind is Parameter:
        return _computed(value, made)
    if kind is not tuple and kind is not list and kind is not dict:
        return value
    elements = value.values() if kind is dict else value
    if Parameter not in map(type, elements):
        return value
    if id(value) not in made:
        inside = [_computed(each, made) if type(each) is Parameter else each for each in elements]
        made[id(value)] = dict(zip(value, inside, strict=True)) if kind is dict else kind(inside)
    return made[id(value)]


def _computed(parameter: Parameter, made: dict[int, Any]) -> Any:
    """Return the tensor for a parameter; the same one each time."""
    if not parameter.requires_grad:
        return parameter
    if id(parameter) not in made:
        tensor = made[id(parameter)] = parameter.view_as(parameter)
        tensor.__dict__.update(parameter.__dict__)
    return made[id(parameter)]


def take_out(tensor: Tensor, tracked: list[Tensor]) -> tuple[Any, ...]:
    """Add a tensor to those that are pickled separately; returns its reduction in the main pickle."""
    tracked.append(tensor)
    return arrived, (TRACKED, len(tracked) - 1)


def rebuilt(
    header: dict[str, Any],
    buffers: Sequence[Any],
    arrivals: Arrivals | None,
    connect: Connect | None,
    read: Callable[..., Any],
) -> tuple[Sequence[Any], Arrivals]:
    """Read the tensors of a message that were pickled separately, and make them part of a graph; without
    ``connect``, they arrive as leaves that require grad. ``read`` is like ``pickle.loads``.

    Returns:
        The buffers of the main pickle, and the arrivals to read it with.
    """
    place = header[TRACKED]
    if type(place) is not int or not 0 < place < len(buffers):
        raise SerializationError(f"the message has its tensors in buffer {str(place)[:20]}, which cannot be")
    outer, receiving.arrivals = receiving.arrivals, arrivals
    try:
        tensors = read(buffers[place], buffers=map(settle, buffers[place + 1 :]))
    finally:
        receiving.arrivals = outer
    if type(tensors) is not tuple or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise SerializationError("what the message has in place of its tensors are none")
    found = connect(list(tensors)) if connect else [tensor.requires_grad_() for tensor in tensors]
    return buffers[:place], {**(arrivals or {}), TRACKED: found}

"""Tensors that require grad, if the receiver makes them part of a graph of its own.

The receiver must have all of them before it builds the object that contains them, as one node of its graph
has all of them as outputs. So they are pickled separately: in the main pickle each is a number, as if it
travelled beside it. Calls and results that consist of usual tensors only need no second pickle
(``pickle_codec``).

A parameter that requires grad is tracked like any other tensor, and so arrives as a tensor, unless a module
or an optimizer in the message has it (``Owned``): these must consist of parameters, so it arrives as a
separate parameter. A message may refer to a parameter before it comes to the module; so this is decided when
the tracked tensors are pickled, after the rest. A parameter that is itself an argument of a call, or in a
list, tuple or dict there, is tracked in any case: a tensor replaces it (``stand_ins``).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module, Parameter, ParameterDict, ParameterList
from torch.optim import Optimizer

from rpc.errors import SerializationError
from rpc.serialization.carriers import arrived, receiving
from rpc.serialization.memory import settle
from rpc.serialization.payload import TRACKED, Arrivals, Connect

logger = logging.getLogger(__name__)

_NO_PARAMETERS: Final = frozenset((Tensor, int, float, bool, str, bytes, type(None)))
"""Types of usual arguments."""

_CONTAINERS: Final = (ParameterList, ParameterDict)

Owned = dict[int, Tensor]
"""Parameters of modules and optimizers in a message, by id."""


def is_tracked(tensor: Tensor, owned: Owned) -> bool:
    """Whether a tensor stays part of the sender's graph, as far as the message has been pickled: any that
    requires grad, other than a parameter of a module, and other than any parameter if gradients are disabled.
    """
    if not tensor.requires_grad or not isinstance(tensor, Parameter):
        return tensor.requires_grad
    usual = type(tensor).__reduce_ex__ in (Parameter.__reduce_ex__, Tensor.__reduce_ex__)
    return usual and id(tensor) not in owned and torch.is_grad_enabled()


def note_module(module: Module, pickler: Any) -> Any:
    """Note the parameters that a module has itself, and in its lists and dicts of parameters; leaves its
    reduction to pickle. A list or dict of parameters outside of a module is a container like any other.
    """
    if isinstance(module, _CONTAINERS):
        return NotImplemented
    held = module.__dict__
    parts = [each.__dict__ for each in held.get("_modules", {}).values() if isinstance(each, _CONTAINERS)]
    return _note((each for part in (held, *parts) for each in part.get("_parameters", {}).values()), pickler)


def note_optimizer(optimizer: Optimizer, pickler: Any) -> Any:
    """Note the parameters of an optimizer; leaves its reduction to pickle."""
    groups = optimizer.__dict__.get("param_groups", ())
    return _note((each for group in groups for each in group.get("params", ())), pickler)


def _note(parameters: Iterable[Any], pickler: Any) -> Any:
    if pickler.owned is not None:
        pickler.owned.update({id(each): each for each in parameters if isinstance(each, Parameter)})
    return NotImplemented


def separate(tracked: list[Tensor], owned: Owned) -> tuple[Tensor, ...]:
    """Return what is pickled of the tracked tensors: their values, and the owned parameters among them, which
    are taken out of ``tracked``.
    """
    pickled = tuple([each if id(each) in owned else each.detach() for each in tracked])
    tracked[:] = [each for each in tracked if id(each) not in owned]
    return pickled


def tell_of_copies(owned: Owned) -> None:
    """Log that owned parameters, if there are any, get no gradients from the receiver."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in owned.values()):
        _tell_of_copies()


@functools.cache
def _tell_of_copies() -> None:
    """Warn once in a process that a module's copy has parameters of its own."""
    logger.warning(
        "a module, or an optimizer, was sent in a call or an answer inside of dist_autograd.context(): the "
        "receiver's copy has parameters of its own, and no gradients of them flow back to the sender's. For "
        "gradients, send the parameters themselves, for example dict(module.named_parameters()) for "
        "torch.func.functional_call, or keep the module on one worker and call it there (RemoteModule)"
    )


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
        tensors = read(buffers[place], buffers=[settle(each) for each in buffers[place + 1 :]])
    finally:
        receiving.arrivals = outer
    if type(tensors) is not tuple or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise SerializationError("what the message has in place of its tensors are none")
    recorded = [number for number, tensor in enumerate(tensors) if not isinstance(tensor, Parameter)]
    found = list(tensors)
    values = [found[number] for number in recorded]
    connected = connect(values) if connect and values else [tensor.requires_grad_() for tensor in values]
    for number, tensor in zip(recorded, connected, strict=True):
        found[number] = tensor
    return buffers[:place], {**(arrivals or {}), TRACKED: found}

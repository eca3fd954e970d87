"""Finds a value's tensors on accelerators, in containers, modules, attributes and slots of objects.

Methods of the value's own classes are not called, but properties may be. Other threads may change the value
meanwhile: each container is copied by one call of its base class, which holds the GIL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from logging import Logger
from math import inf
from threading import Thread
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType, NoneType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

__all__ = ["Found", "search"]

_MAX_DEPTH: Final = 8
"""Maximum nesting of containers that are searched."""

_SIMPLE: Final = frozenset({NoneType, str, bytes, bool, int, float, complex, type, torch.dtype, torch.device})
"""Types of objects that have no tensors."""

_OPAQUE: Final = (FunctionType, MethodType, ModuleType, Logger, Thread)
"""Types of objects that are not looked into."""

_OURS: Final = ("rpc", "rref", "dist_autograd", "dist_optim")
"""Packages whose objects are not looked into: what they do with their tensors is in order."""

_CONTAINERS: Final = (list, tuple, set, frozenset, deque)

_OF_MODULES: Final = frozenset(vars(Module()))
"""Names of attributes that each module has, such as its parameters, modules and hooks."""


class Found(NamedTuple):
    """What a search has found.

    Attributes:
        tensors: the tensors.
        may_have_more: whether the value may have others, where the search does not look.
        is_too_large: whether the search has ended before it has looked everywhere.
    """

    tensors: list[Tensor]
    may_have_more: bool
    is_too_large: bool


def search(value: Any, most: float = inf) -> Found:
    """Find the tensors in a value.

    Args:
        most: maximum number of parts of containers and objects to look at. Modules, their parameters and
            their buffers do not count.
    """
    searching = _Search(most)
    searching.look_at(value, 0)
    return Found(searching.tensors, searching.may_have_more, searching.is_too_large)


class _Search:
    def __init__(self, most: float) -> None:
        self.tensors: list[Tensor] = []
        self.may_have_more = self.is_too_large = False
        self._left = most
        self._seen: set[int] = set()

    def look_at(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _SIMPLE or id(value) in self._seen:
            return
        if issubclass(kind, Tensor):
            self._seen.add(id(value))
            if not value.is_cpu and not value.is_meta:
                self.tensors.append(value)
        elif depth > _MAX_DEPTH or _is_opaque(kind):
            self.may_have_more = True
        else:
            self._seen.add(id(value))
            try:
                self._look_into(value, depth + 1)
            except Exception:  # of a descriptor of the value's own: the value can be used all the same
                self.may_have_more = True

    def _look_into(self, value: Any, depth: int) -> None:
        kind = type(value)
        if issubclass(kind, Module):
            self.may_have_more = True
            self._look_into_modules(value, depth)
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._look_at_all(attributes.values(), depth, len(attributes))
        slotted = [each for each in kind.__mro__ if "__slots__" in vars(each)]
        slots = [part for each in slotted for part in _slots(each, value)]
        self._look_at_all(slots, depth, len(slots))
        if issubclass(kind, dict):
            self._look_at_all(dict.keys(value), depth, dict.__len__(value))
            self._look_at_all(dict.values(value), depth, dict.__len__(value))
            return
        for container in _CONTAINERS:
            if issubclass(kind, container):
                self._look_at_all(container.__iter__(value), depth, container.__len__(value))
                return
        if issubclass(kind, partial):
            self._look_at_all([value.func, *value.args, *value.keywords.values()], depth, len(value.args))
        elif attributes is None:
            is_of_slots_alone = len(slotted) == len(kind.__mro__) - 1  # without `object`
            self.may_have_more |= not is_of_slots_alone

    def _look_at_all(self, parts: Iterable[Any], depth: int, count: int) -> None:
        if count > self._left:
            self.may_have_more = self.is_too_large = True
            return
        self._left -= count
        for each in [*parts]:
            if type(each) not in _SIMPLE:
                self.look_at(each, depth)

    def _look_into_modules(self, outermost: Module, depth: int) -> None:
        waiting: list[Module | None] = [outermost]
        seen: set[int] = set()
        while waiting:
            module = waiting.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                self.look_at(tensor, depth)
            attributes = vars(module)
            own = [attributes.get(name) for name in attributes.keys() - _OF_MODULES]
            self._look_at_all(own, depth, len(own))
            waiting += module._modules.values()


def _slots(kind: type, value: Any) -> list[Any]:
    """Return what is in the slots that a class has given its objects."""
    members = [each for each in vars(kind).values() if isinstance(each, MemberDescriptorType)]
    parts = []
    for member in members:
        with suppress(AttributeError):  # nothing is in it
            parts.append(member.__get__(value))
    return parts


def _is_opaque(kind: type) -> bool:
    if issubclass(kind, Module):
        return False
    return issubclass(kind, _OPAQUE) or str(kind.__module__).partition(".")[0] in _OURS

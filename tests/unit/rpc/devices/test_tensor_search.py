"""Which tensors on devices are found in a value; none is here, so tensors of a subclass say that they are."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rpc.devices.tensor_search import search


class OnDevice(Tensor):
    is_cpu = False


def on_device() -> Any:
    return torch.ones(1).as_subclass(OnDevice)


class Plain:
    def __init__(self, value: Any = None) -> None:
        self.value = value


class Named(NamedTuple):
    value: Any


@dataclass
class Data:
    value: Any


@dataclass(slots=True)
class SlottedData:
    value: Any


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class SlottedList(list[Any]):
    __slots__ = ("__hidden", "unset")

    def __init__(self, value: Any) -> None:
        self.__hidden = value


class HalfSlotted(Slotted):
    """Has attributes, too."""


def module(value: Any) -> nn.Module:
    """One with a value as an attribute, in another one's module."""
    inner: Any = nn.Linear(2, 2)
    inner.cache = value
    return nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(inner)))))


def buffer(value: Any) -> nn.Module:
    made = nn.Module()
    made.register_buffer("buffer", value)
    return made


def nested(depth: int, value: Any) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def after_the_same_too_deep(value: Any) -> Any:
    plain = Plain(value)
    return [nested(9, plain), plain]


PLACES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda value: value,
    "list": lambda value: [1, "text", value],
    "tuple": lambda value: (value,),
    "set": lambda value: {value},
    "deque": lambda value: deque([value]),
    "key": lambda value: {value: 1},
    "value": lambda value: {1: value},
    "ordered": lambda value: OrderedDict([(1, value)]),
    "attribute": Plain,
    "named tuple": Named,
    "dataclass": Data,
    "slotted dataclass": SlottedData,
    "slot": Slotted,
    "slot of a list": SlottedList,
    "slot of a base class": HalfSlotted,
    "partial": lambda value: partial(torch.add, value),
    "module": module,
    "buffer": buffer,
    "eight deep": partial(nested, 8),
    "after the same too deep": after_the_same_too_deep,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_tensors_are_found(place: Callable[[Any], Any]) -> None:
    tensor = on_device()
    (found,) = search(place(tensor)).tensors
    assert found is tensor


HIDDEN: dict[str, Callable[[Any], Any]] = {
    "function": lambda value: lambda: value,
    "ten deep": partial(nested, 10),
    "iterator": lambda value: iter([value]),
}


@pytest.mark.parametrize("place", HIDDEN.values(), ids=HIDDEN)
def test_what_is_not_looked_into_may_have_tensors(place: Callable[[Any], Any]) -> None:
    found = search(place(on_device()))
    assert found == ([], True, False)


@pytest.mark.parametrize(
    "value", [None, 1, "text", [1, 2], {1: "one"}, Plain(), torch.ones(1), Data(2.0), Slotted(1)]
)
def test_what_has_no_tensors_on_devices_is_known_to_have_none(value: Any) -> None:
    assert search(value) == ([], False, False)


class RaisingLength(list[Any]):
    def __len__(self) -> int:
        raise RuntimeError("no length")


class RaisingValues(dict[Any, Any]):
    def values(self) -> Any:
        raise RuntimeError("no values")


class RaisingAttributes:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no attributes")


class RaisingClass:
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("no class")


@dataclass
class RaisingField:
    value: int = 0

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no fields")


class RaisingModules(nn.Module):
    def modules(self, *_: Any) -> Iterator[nn.Module]:
        raise RuntimeError("no modules")


class Unfinished(nn.Module):
    def __init__(self) -> None:
        pass


ODD = (
    RaisingLength,
    RaisingValues,
    RaisingAttributes,
    RaisingClass,
    RaisingField,
    RaisingModules,
    Unfinished,
)


@pytest.mark.parametrize("odd", ODD)
def test_odd_objects_do_not_fail_the_search(odd: Callable[[], Any]) -> None:
    tensor = on_device()
    assert search([odd(), tensor]).tensors == [tensor]


@pytest.mark.parametrize(
    "value", [list(range(11)), dict.fromkeys(range(6)), [[1] * 6, [1] * 6], [Plain() for _ in range(11)]]
)
def test_a_large_value_is_not_searched_in_full(value: Any) -> None:
    assert search([value], 11).is_too_large


def test_what_is_small_beside_something_large_is_searched() -> None:
    tensor = on_device()
    found = search({"large": list(range(1000)), "small": [Plain(tensor)]}, 100)
    assert (found.tensors, found.is_too_large) == ([tensor], True)


def test_parameters_do_not_count() -> None:
    large = nn.Sequential(*(nn.Linear(1, 1) for _ in range(50)))
    assert not search(large, 101).is_too_large  # the two sizes of each


def test_modules_of_this_process_are_not_searched() -> None:
    assert search([torch.nn, logging.getLogger("a logger"), threading.current_thread()], 3) == (
        [],
        True,
        False,
    )


def test_other_threads_may_change_modules_meanwhile() -> None:
    changing, ends = nn.Sequential(nn.Linear(1, 1)), threading.Event()

    def change() -> None:
        while not ends.is_set():
            changing.add_module("more", nn.Sequential(nn.Linear(1, 1)))
            changing.cache = on_device()
            del changing.more, changing.cache

    thread = threading.Thread(target=change)
    thread.start()
    try:
        found = [search(changing) for _ in range(3000)]
    finally:
        ends.set()
        thread.join()
    assert {len(each.tensors) for each in found} <= {0, 1}

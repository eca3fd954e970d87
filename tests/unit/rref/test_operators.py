"""Operators on references raise an error that says what to write."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest

from rref import RRef
from rref.proxy import RRefProxy


def reference() -> Any:
    return RRef.__new__(RRef)


def enter(value: Any) -> None:
    with value:
        pass


def proxy() -> Any:
    return RRefProxy("a reference", lambda name, *_: name, 0.0)


@pytest.mark.parametrize("make", [reference, proxy])
@pytest.mark.parametrize(
    "use",
    [
        len,
        iter,
        enter,
        lambda value: value[0],
        lambda value: 0 in value,
        lambda value: value + 1,
        lambda value: 2 * value,
        operator.neg,
    ],
)
def test_an_operator_is_refused_with_a_hint(use: Callable[[Any], Any], make: Callable[[], Any]) -> None:
    value = make()
    with pytest.raises(TypeError, match=r"has no .*: .*\.__[a-z]+__\(") as refused:
        use(value)
    assert "to_here()" in str(refused.value)
    assert "__iter__" not in str(refused.value), "an iterator cannot be sent"


@pytest.mark.parametrize("make", [reference, proxy])
def test_a_reference_is_true(make: Callable[[], Any]) -> None:
    assert make()


def test_special_methods_of_the_object_are_called_through_a_proxy() -> None:
    value = proxy()
    names = ["__len__", "__enter__", "__getitem__", "__contains__", "__bool__", "__call__", "forward"]
    assert [getattr(value, name)() for name in names] == names
    assert repr(value) == "<proxy of a reference>"

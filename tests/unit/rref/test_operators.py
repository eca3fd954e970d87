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


@pytest.mark.parametrize(
    "use",
    [
        len,
        iter,
        enter,
        lambda value: value[0],
        lambda value: value + 1,
        lambda value: 2 * value,
        operator.neg,
    ],
)
def test_an_operator_is_refused_with_a_hint(use: Callable[[Any], Any]) -> None:
    value = reference()
    with pytest.raises(TypeError, match=r"has no .*: .*to_here\(\)"):
        use(value)


def test_a_reference_is_true() -> None:
    assert reference()


def test_special_methods_of_the_object_are_called_through_a_proxy() -> None:
    proxy: Any = RRefProxy("a reference", lambda name, *_: name, 0.0)
    assert [proxy.__len__(), proxy.__enter__(), proxy.__getitem__(0)] == [
        "__len__",
        "__enter__",
        "__getitem__",
    ]

"""Operators on references and proxies raise an error that says what to write."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest

from rref import RRef
from rref.proxy import RRefProxy


def reference() -> Any:
    return RRef.__new__(RRef)


def proxy() -> Any:
    return RRefProxy("a reference", lambda *_: None, 0.0)


def enter(value: Any) -> None:
    with value:
        pass


@pytest.mark.parametrize("make", [reference, proxy])
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
def test_an_operator_is_refused_with_a_hint(make: Callable[[], Any], use: Callable[[Any], Any]) -> None:
    value = make()
    with pytest.raises(TypeError, match=r"has no .*: .*to_here\(\)"):
        use(value)


@pytest.mark.parametrize("make", [reference, proxy])
def test_a_reference_is_true(make: Callable[[], Any]) -> None:
    assert make()

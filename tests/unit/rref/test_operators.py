"""Operators on references raise an error that says what to write."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rref import RRef
from rref.proxy import RRefProxy


def reference() -> Any:
    return RRef.__new__(RRef)


def enter(value: Any) -> None:
    with value:
        pass


def proxy() -> Any:
    return RRefProxy("a reference", lambda name, *_: name, 0.0)


def uncalled() -> Any:
    return proxy().weights


@pytest.mark.parametrize("make", [reference, proxy, uncalled])
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
        lambda value: value // 2,
        lambda value: 2 % value,
        operator.invert,
        lambda value: value & 1,
        lambda value: 1 | value,
        lambda value: value ^ 1,
        lambda value: 1 << value,
        lambda value: value >> 1,
        lambda value: value < 1,
        lambda value: value >= 1,
        lambda value: torch.ones(1) * value,
        float,
        int,
        abs,
        round,
    ],
)
def test_an_operator_is_refused_with_a_hint(use: Callable[[Any], Any], make: Callable[[], Any]) -> None:
    value = make()
    with pytest.raises(TypeError, match=r"has no .*: .*\.(__[a-z]+__|name)\(") as refused:
        use(value)
    assert "to_here()" in str(refused.value)
    assert "__iter__" not in str(refused.value), "an iterator cannot be sent"


@pytest.mark.parametrize("make", [reference, proxy])
def test_a_reference_is_no_function(make: Callable[[], Any]) -> None:
    """Calls check at once whether what they are to call can be called."""
    assert not callable(make())


@pytest.mark.parametrize("make", [reference, proxy, uncalled])
def test_a_reference_is_true(make: Callable[[], Any]) -> None:
    assert make()


def test_special_methods_of_the_object_are_called_through_a_proxy() -> None:
    value = proxy()
    names = ["__len__", "__enter__", "__getitem__", "__contains__", "__bool__", "__call__", "forward"]
    assert [getattr(value, name)() for name in names] == names
    assert repr(value) == "<proxy of a reference>"


def test_a_method_that_is_not_called_says_what_to_write() -> None:
    method = proxy().weights
    assert repr(method).startswith(
        "<remote method 'weights', not called: write .weights(...); if it is no method"
    )
    for use in (lambda: method.shape, lambda: setattr(method, "grad", None)):
        with pytest.raises(
            AttributeError, match=r"'weights', which a proxy takes for a method: .*\.weights\("
        ):
            use()
    assert method.__name__ == method() == copy.deepcopy(method)() == "weights"


def test_attributes_cannot_be_changed_through_a_proxy() -> None:
    value = proxy()
    said = r"cannot change the attribute 'weights' .* define a method"
    with pytest.raises(AttributeError, match=said):
        value.weights = 1
    with pytest.raises(AttributeError, match=said):
        del value.weights


def test_a_proxy_is_no_array() -> None:
    """PyTorch and NumPy look for names of theirs, which would be calls to the owner."""
    value = proxy()
    assert not any(hasattr(value, name) for name in ("__torch_function__", "__array__", "__dlpack__"))
    assert repr(pickle.loads(pickle.dumps(RRefProxy("a reference", print, 0.0)))) == repr(value)

"""Operators that references and proxies do not have: the error says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

__all__ = ["SPECIAL", "without_operators"]

K = TypeVar("K", bound=type)

_OPERATORS: Final = {
    "len()": ("__len__",),
    "[]": ("__getitem__", "__setitem__", "__delitem__"),
    "iteration": ("__iter__",),
    "'in'": ("__contains__",),
    "'with'": ("__enter__", "__exit__"),
    "+": ("__add__", "__radd__"),
    "-": ("__sub__", "__rsub__", "__neg__"),
    "*": ("__mul__", "__rmul__"),
    "/": ("__truediv__", "__rtruediv__"),
    "@": ("__matmul__", "__rmatmul__"),
    "**": ("__pow__", "__rpow__"),
    "//": ("__floordiv__", "__rfloordiv__"),
    "%": ("__mod__", "__rmod__"),
    "&": ("__and__", "__rand__"),
    "|": ("__or__", "__ror__"),
    "^": ("__xor__", "__rxor__"),
    "~": ("__invert__",),
    "<<": ("__lshift__", "__rlshift__"),
    ">>": ("__rshift__", "__rrshift__"),
    "<": ("__lt__",),
    "<=": ("__le__",),
    ">": ("__gt__",),
    ">=": ("__ge__",),
    "float()": ("__float__",),
    "int()": ("__int__",),
    "abs()": ("__abs__",),
    "round()": ("__round__",),
}


SPECIAL: Final = frozenset(name for names in _OPERATORS.values() for name in names) | {"__bool__"}
"""Names of the methods that are defined."""


def without_operators(hint: str) -> Callable[[K], K]:
    """Return a decorator of a class: operators on its instances raise ``TypeError`` with a hint, in which
    ``{method}`` is the name of the operator's method.
    """

    def decorate(kind: K) -> K:
        for operator, names in _OPERATORS.items():
            for name in names:
                method = "__getitem__" if name == "__iter__" else name  # an iterator cannot be sent
                text = f"{kind.__name__} has no {operator}: {hint.format(method=method)}"
                setattr(kind, name, _refusal(text))
        setattr(kind, "__bool__", lambda _: True)  # noqa: B010  # otherwise its length would be asked for
        return kind

    return decorate


def _refusal(text: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        raise TypeError(text)

    return refuse

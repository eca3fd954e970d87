"""Calling methods of a remote object as if it were local: ``rref.rpc_sync().method(...)``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

from rref.operators import SPECIAL, without_operators

__all__ = ["RRefProxy"]

Invocation = Callable[[str, tuple[Any, ...], dict[str, Any], float], Any]
"""Calls a method of one object. Arguments: name, positional and keyword arguments, timeout in seconds."""


@without_operators(
    "it calls methods of the object, such as .{method}(...); rref.to_here() fetches the object"
)
class RRefProxy:
    """A stand-in for a remote object; its attributes call the object's methods on the owner.

    Returned by ``RRef.rpc_sync``, ``RRef.rpc_async`` and ``RRef.remote``; can be used any number of times.

    Args:
        rref: the reference to the object, shown in ``repr``.
        invoke: calls a method.
        timeout: timeout of each call, in seconds.
    """

    __slots__ = ("_invoke", "_rref", "_timeout")

    def __init__(self, rref: object, invoke: Invocation, timeout: float) -> None:
        _set_rref(self, rref)  # not by ``__setattr__``, which takes longer
        _set_invoke(self, invoke)
        _set_timeout(self, timeout)

    def __getattribute__(self, name: str) -> Any:
        """Return a method of the object. Operators do not come here: Python takes them from the class."""
        if name in _OWN:
            return object.__getattribute__(self, name)
        return RemoteMethod(_call, _invoke_of(self), name, _timeout_of(self))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in RRefProxy.__slots__:
            raise AttributeError(_no_assignment(name))
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(_no_assignment(name))

    def __repr__(self) -> str:
        return f"<proxy of {self._rref}>"


def _no_assignment(name: str) -> str:
    return (
        f"cannot change the attribute '{name}' through a proxy, which only calls methods of the object: "
        f"define a method that changes it"
    )


def _call(invoke: Invocation, name: str, timeout: float, /, *args: Any, **kwargs: Any) -> Any:
    return invoke(name, args, kwargs, timeout)


@without_operators(
    "it has to be called, as in .name(...). An attribute of the object cannot be read: define a method that "
    "returns it, or fetch the object by rref.to_here()"
)
class RemoteMethod(partial[Any]):
    """A method of a remote object, as an attribute of a proxy."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("__name__", "__qualname__"):
                return self.args[1]
            if name.startswith("__"):
                raise AttributeError(f"a method of a remote object has no attribute '{name}'")
            raise AttributeError(_not_called(self.args[1], f".{name}"), name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(_not_called(self.args[1], f".{name} = ..."))

    def __deepcopy__(self, memo: object) -> RemoteMethod:
        return self  # as of a function

    def __repr__(self) -> str:
        name = self.args[1]
        return (
            f"<remote method '{name}', not called: write .{name}(...); if it is no method, define one that "
            f"returns it>"
        )


def _not_called(method: str, use: str) -> str:
    return (
        f"cannot use {use} of '{method}', which a proxy takes for a method: call it, as in .{method}(...). "
        f"If '{method}' is no method, define one that returns what you need, or fetch the object by "
        f"rref.to_here()"
    )


_PROBED: Final = frozenset(
    {
        "__array__",
        "__array_interface__",
        "__array_priority__",
        "__array_struct__",
        "__array_ufunc__",
        "__cuda_array_interface__",
        "__dlpack__",
        "__torch_dispatch__",
        "__torch_function__",
    }
)
"""Names by which NumPy and PyTorch recognize arrays: not to be found, so they reject a proxy."""

_OWN: Final = (frozenset(dir(RRefProxy)) - SPECIAL) | _PROBED
_SLOTS: Final = RRefProxy.__dict__
_invoke_of: Final = _SLOTS["_invoke"].__get__
_timeout_of: Final = _SLOTS["_timeout"].__get__
_set_rref: Final = _SLOTS["_rref"].__set__
_set_invoke: Final = _SLOTS["_invoke"].__set__
_set_timeout: Final = _SLOTS["_timeout"].__set__

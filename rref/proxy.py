"""Calling methods of a remote object as if it were local: ``rref.rpc_sync().method(...)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

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
        self._rref = rref
        self._invoke = invoke
        self._timeout = timeout

    def __getattribute__(self, name: str) -> Any:
        """Return a method of the object. Operators do not come here: Python takes them from the class."""
        if name in _OWN:
            return object.__getattribute__(self, name)
        invoke, timeout = _invoke_of(self), _timeout_of(self)

        def method(*args: Any, **kwargs: Any) -> Any:
            return invoke(name, args, kwargs, timeout)

        method.__name__ = method.__qualname__ = name
        return method

    def __repr__(self) -> str:
        return f"<proxy of {self._rref}>"


_OWN: Final = frozenset(dir(RRefProxy)) - SPECIAL
_invoke_of: Final = RRefProxy.__dict__["_invoke"].__get__
_timeout_of: Final = RRefProxy.__dict__["_timeout"].__get__

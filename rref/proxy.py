"""Calling the methods of a remote object as if it were here: ``rref.rpc_sync().method(...)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rpc.agent.futures import Future
from rpc.api import collect
from rpc.errors import with_article
from rref.reference import RRef
from rref.requests import INVOKE

__all__ = ["RRefProxy", "invoke_async", "invoke_remote", "invoke_sync"]

Invocation = Callable[[RRef[Any], str, tuple[Any, ...], dict[str, Any], float], Any]


class RRefProxy:
    """Stands for a remote object; its attributes call the object's methods on the owner.

    Made by ``RRef.rpc_sync``, ``RRef.rpc_async`` and ``RRef.remote``; can be used any number of times.

    Args:
        rref: refers to the object.
        invoke: how to call.
        timeout: seconds for each call.
    """

    __slots__ = ("_invoke", "_rref", "_timeout")

    def __init__(self, rref: RRef[Any], invoke: Invocation, timeout: float) -> None:
        self._rref = rref
        self._invoke = invoke
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        rref, invoke, timeout = self._rref, self._invoke, self._timeout

        def method(*args: Any, **kwargs: Any) -> Any:
            return invoke(rref, name, args, kwargs, timeout)

        method.__name__ = method.__qualname__ = name
        return method

    def __repr__(self) -> str:
        return f"<proxy of {self._rref!r}>"


def invoke_sync(
    rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
) -> Any:
    """Call a method and wait for its value."""
    payload, what = rref._message(name, args, kwargs, timeout)
    return rref._references.agent.caller.inquire(rref._owner, INVOKE, payload, timeout, what)


def invoke_async(
    rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
) -> Future[Any]:
    """Call a method; a future of its value. What hinders the call is the future's error."""
    try:
        future = rref._references.agent.caller.future(rref._invoke(name, args, kwargs, timeout))
    except RuntimeError as error:
        future = Future()
        future.set_exception(error)
    collect(future)
    return future


def invoke_remote(
    rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float
) -> RRef[Any]:
    """Call a method; a reference to its value, which stays on the owner.

    Raises:
        AttributeError: the object has no such attribute; its type is asked for once, to say so here.
    """
    timeout = rref._references.agent.caller.effective_timeout(timeout)
    kind = rref._get_type(timeout)
    if not hasattr(kind, name) and not _has_own_attributes(kind):
        raise AttributeError(f"the object of {rref!r}, {with_article(kind)}, has no attribute '{name}'")
    shell = rref._usable(name, timeout)
    owner = rref._owner
    payload = rref._dump_call(name, args, kwargs)
    what = f"method '{name}' of {rref!r}"
    made = shell.create(owner, rref._target(name), payload, timeout, what, RRef._of)
    assert made._creation is not None
    made._creation.hold(rref)
    return made


def _has_own_attributes(kind: type) -> bool:
    """Whether objects of a type may have methods that the type does not show."""
    return hasattr(kind, "__getattr__")

"""Decorators for functions that other workers call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

__all__ = ["async_execution"]

P = ParamSpec("P")
R = TypeVar("R")

ASYNC_EXECUTION_MARK: Final = "_wrapped_async_rpc_function"
"""The attribute that marks a function as asynchronous; PyTorch's name, which user code looks for."""


def async_execution(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that returns a ``torch.futures.Future``; its caller is answered when that is completed.

    The executor thread that runs it is free as soon as the function returns, so it can chain calls
    (``rpc_async(...).then(...)``) or gather requests of many callers without holding threads. Works on
    functions, on TorchScript functions, on methods, and on static and class methods, where the order of the
    decorators does not matter; called by ``rpc_sync``, ``rpc_async``, ``remote`` and through RRef proxies.

    Args:
        function: returns a ``torch.futures.Future`` whose value is what the caller gets.

    Example::

        @rpc.functions.async_execution
        def add_on_another(to, x, y, z):
            return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda total: total.wait() + z)
    """
    if isinstance(function, staticmethod | classmethod):
        return type(function)(async_execution(function.__func__))

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    setattr(wrapper, ASYNC_EXECUTION_MARK, function)
    return wrapper

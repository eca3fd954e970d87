"""Backends by name. ``BackendType`` is an enumeration that registering a backend extends."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from rpc.errors import RpcError
from rpc.lifecycle.own_backend import start_agent
from rpc.options import (
    DEFAULT_INIT_METHOD,
    DEFAULT_RPC_TIMEOUT,
    AgentOptions,
    GrpcRpcBackendOptions,
    TensorPipeRpcBackendOptions,
)


class BackendValue(NamedTuple):
    """The functions of a backend: one makes its options, the other starts its agent."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


class _OpenEnumeration(type):
    """Behaves like an ``enum.Enum`` class to which members can be added. An ``Enum`` cannot gain members, and
    a new one for each backend would not contain the members that a program already holds.
    """

    _members: dict[str, BackendType]

    def __iter__(cls) -> Iterator[BackendType]:
        return iter(list(cls._members.values()))

    def __len__(cls) -> int:
        return len(cls._members)

    def __getitem__(cls, name: str) -> BackendType:
        return cls._members[name]

    def __contains__(cls, member: object) -> bool:
        return any(member is each for each in cls._members.values())

    def __getattr__(cls, name: str) -> BackendType:
        try:
            return cls._members[name]
        except KeyError:
            known = ", ".join(cls._members) or "none"
            raise AttributeError(f"no RPC backend is registered as {name!r}; there are: {known}") from None

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *cls._members]

    @property
    def __members__(cls) -> Mapping[str, BackendType]:
        return MappingProxyType(cls._members)


class BackendType(metaclass=_OpenEnumeration):
    """The available backends, as an enumeration: ``BackendType.TENSORPIPE``, ``BackendType["TENSORPIPE"]``.
    ``register_backend`` adds to it.
    """

    _members: ClassVar[dict[str, BackendType]]

    def __init__(self, name: str, value: BackendValue) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (BackendType, self.name)


BackendType._members = {
    name: BackendType(name, BackendValue(options, start_agent))
    for name, options in (
        ("FARCALL", AgentOptions),
        ("TENSORPIPE", TensorPipeRpcBackendOptions),
        ("GRPC", GrpcRpcBackendOptions),
    )
}


def backend_registered(backend_name: str) -> bool:
    """Whether a backend with this name is registered."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> BackendType:
    """Register a backend, so that ``init_rpc(backend=BackendType.NAME)`` starts its agent.

    Args:
        backend_name: name of the backend, a member of ``BackendType`` from now on.
        construct_rpc_backend_options_handler: called with ``rpc_timeout`` and ``init_method`` (both as
            keywords) and the user's further keywords; returns the options, an instance of a class that
            derives from ``RpcBackendOptions`` and belongs to this backend alone.
        init_backend_handler: called with the keywords ``store``, ``name``, ``rank``, ``world_size`` and
            ``rpc_backend_options``; returns the running agent, an ``AgentInterface``.

    Returns:
        The new member of ``BackendType``.

    Raises:
        RpcError: the name is taken.
    """
    if backend_registered(backend_name):
        raise RpcError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType._members[backend_name] = backend = BackendType(backend_name, value)
    return backend


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Make a backend's options from its defaults and the given values, which may be all of them."""
    return backend.value.construct_rpc_backend_options_handler(
        rpc_timeout=rpc_timeout, init_method=init_method, **kwargs
    )


def init_backend(backend: BackendType, *args: Any, **kwargs: Any) -> Any:
    """Start a backend's agent with the arguments of its handler, and return it."""
    return backend.value.init_backend_handler(*args, **kwargs)

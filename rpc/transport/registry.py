"""Transports by name: those of this package, and those that installed distributions declare by entry points
of the group ``farcall.transports``, which includes farcall's own gRPC.

A transport of another package is used if the option ``transports`` names it. Its entry point is a class, or
function, that makes a ``Transport`` of a ``TransportContext``::

    [project.entry-points."farcall.transports"]
    quic = "my_package.quic:QuicTransport"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, cast

from rpc.entry_points import entry_points
from rpc.transport.base import Transport, TransportContext
from rpc.transport.tcp import TcpTransport
from rpc.transport.unix import UnixTransport

__all__ = ["load", "names", "transports"]

GROUP: Final = "farcall.transports"

Factory = Callable[[TransportContext], Transport]

_OURS: Final[dict[str, Factory]] = {"unix": UnixTransport, "tcp": TcpTransport}
"""The transports of this package, the preferred first."""

_BY_DEFAULT: Final[tuple[str, ...]] = tuple(_OURS)


def names() -> list[str]:
    """Return the names of all transports."""
    return [*_OURS, *sorted(point.name for point in entry_points(GROUP) if point.name not in _OURS)]


def load(names: Iterable[str]) -> None:
    """Import what transports of these names need, before anything else is done.

    Raises:
        ImportError: something is not installed.
        ValueError: there is no transport of that name.
    """
    for name in names:
        _find(name)


def transports(context: TransportContext, chosen: Iterable[str] | None = None) -> dict[str, Transport]:
    """Make the transports of an agent, by scheme, the preferred first.

    Args:
        chosen: their names, in any order; default: those of this package.

    Raises:
        ValueError: there is no transport of that name.
    """
    wanted = set(_BY_DEFAULT if chosen is None else chosen)
    in_order = [name for name in _OURS if name in wanted] + sorted(wanted - _OURS.keys())
    made = [_find(name)(context) for name in in_order]
    return {transport.scheme: transport for transport in made}


def _find(name: str) -> Factory:
    if name in _OURS:
        return _OURS[name]
    for point in entry_points(GROUP).select(name=name):
        return cast("Factory", point.load())
    raise ValueError(f"there is no transport '{name}': there are {', '.join(names())}")

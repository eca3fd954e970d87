"""Hooks: handlers for stages of an agent's life."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rpc.group.peer import Peer

__all__ = ["Hooks"]


@dataclass(frozen=True, slots=True)
class Hooks:
    """Handlers for stages of an agent's life, each kind called in the order of registration.

    ``formed`` is called on the joining thread with the key of the group, before any other worker can be met.
    ``joined``, ``broke`` and ``gone`` are called on the loop's thread: when another worker has become known,
    when the connection to it broke and is made again, and when it is gone for good, with the reason. So is
    ``out``, with the reason, when this worker is out of its dynamic group, after all others are lost.
    ``leaving`` is called when a graceful shutdown begins, to end what it would wait for; ``close`` on the
    closing thread, when this worker leaves; ``closed`` when it has left: no worker that it waits for will
    answer any more. ``forked`` is called in a forked child, where it must not wait for
    a lock. ``awaited`` return the workers from which something is awaited now, so that their silence is
    noticed; on the loop's thread.

    ``release`` and ``check`` belong to a graceful shutdown and are called on its thread: ``release`` after
    the first round, to release what this worker holds on others; ``check`` after the second, to raise if
    others still hold something here.
    """

    formed: list[Callable[[str], object]] = field(default_factory=list)
    joined: list[Callable[[Peer], object]] = field(default_factory=list)
    broke: list[Callable[[Peer], object]] = field(default_factory=list)
    gone: list[Callable[[Peer, str], object]] = field(default_factory=list)
    out: list[Callable[[str], object]] = field(default_factory=list)
    leaving: list[Callable[[], object]] = field(default_factory=list)
    close: list[Callable[[], object]] = field(default_factory=list)
    closed: list[Callable[[], object]] = field(default_factory=list)
    forked: list[Callable[[], object]] = field(default_factory=list)
    awaited: list[Callable[[], Iterable[Peer]]] = field(default_factory=list)
    release: list[Callable[[], object]] = field(default_factory=list)
    check: list[Callable[[], object]] = field(default_factory=list)

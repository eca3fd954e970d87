"""What is called at the turns of an agent's life."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rpc.group.peer import Peer

__all__ = ["Hooks"]


@dataclass(frozen=True, slots=True)
class Hooks:
    """Handlers, each kind called in the order in which they were added.

    Attributes:
        joined: on the loop's thread, when another worker has become known.
        gone: on the loop's thread, when a worker is gone for good, with the reason.
        close: on the closing thread, when this worker leaves.
        closed: on the closing thread, when this worker has left: nobody it waits for will answer any more.
        forked: in a forked child, where they may wait for no lock.
    """

    joined: list[Callable[[Peer], object]] = field(default_factory=list)
    gone: list[Callable[[Peer, str], object]] = field(default_factory=list)
    close: list[Callable[[], object]] = field(default_factory=list)
    closed: list[Callable[[], object]] = field(default_factory=list)
    forked: list[Callable[[], object]] = field(default_factory=list)

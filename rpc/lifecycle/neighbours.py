"""The interface of a dynamic group's keeper to its agent: the other workers of the group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from rpc.agent.calls import Caller
from rpc.agent.group import AgentGroup
from rpc.errors import GroupMismatchError, RpcTimeoutError, WorkerLostError
from rpc.group.workers import Member
from rpc.options import UNSET_TIMEOUT
from rpc.runtime.legible import legible

__all__ = ["AgentNeighbours", "introduce", "make_connection"]

logger = logging.getLogger(__name__)


def make_connection() -> None:
    """Called remotely to make a connection."""


def introduce(caller: Caller, members: Sequence[Member]) -> None:
    """Connect to the members of a dynamic group that this worker joins, and wait until that has succeeded or
    failed.
    """
    calls = []
    for member in members:
        try:
            calls.append(caller.call(member.name, make_connection, (), {}, UNSET_TIMEOUT))
        except WorkerLostError as error:
            logger.info("left out of the group: %s", error)
    for call in calls:
        try:
            call.result()
        except WorkerLostError as error:
            logger.info("left out of the group: %s", legible(error))
        except RpcTimeoutError as error:
            logger.warning("a worker does not answer: %s", error)


class AgentNeighbours:
    """``Neighbours`` of an agent that has joined its group. From any thread.

    Args:
        out: called with the reason when this worker is out of its group; see ``Hooks``.
    """

    def __init__(self, group: AgentGroup, out: Sequence[Callable[[str], object]] = ()) -> None:
        self._group = group
        self._out = out

    def roster(self) -> Sequence[Member]:
        return self._group.peers.view.present()

    def has_met(self, incarnation: int) -> bool:
        peer = self._group.peers.by_incarnation(incarnation)
        return peer is not None and (peer.connected or peer.session.connections > 0)

    def gone_reason(self, incarnation: int) -> str | None:
        return self._group.peers.view.gone_reason(incarnation)

    def meet(self, members: Sequence[Member]) -> None:
        def admit() -> None:
            for member in members:
                self._admit(member)

        self._on_loop(admit)

    def put_out(self, reason: str) -> None:
        self._on_loop(lambda: self._lose_all(reason))

    def _admit(self, member: Member) -> None:
        try:
            if self._group.peers.view.join(member):
                self._group.peers.watch_over(self._group.peers.ensure(member))
        except WorkerLostError:
            pass  # it is still in the log
        except GroupMismatchError as error:
            logger.warning("worker '%s' is not accepted: %s", member.name, legible(error))

    def _lose_all(self, reason: str) -> None:
        self._group.connections.stop_listening()
        for peer in self._group.peers.all():
            if not peer.is_self:
                self._group.connections.lose(peer, reason)
        for told in list(self._out):  # another thread may remove one
            told(reason)

    def _on_loop(self, function: Callable[[], Any]) -> None:
        try:
            self._group.on_loop(function)
        except RuntimeError:
            if not self._group.connections.closed:
                raise

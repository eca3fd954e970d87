"""The other workers of a dynamic group, as an agent knows them: what the group's keeper needs of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from rpc.agent.agent import Agent
from rpc.errors import GroupMismatchError, RpcTimeoutError, WorkerLostError
from rpc.group.workers import Member
from rpc.options import UNSET_TIMEOUT

__all__ = ["AgentNeighbours", "introduce", "noop"]

logger = logging.getLogger(__name__)


def noop() -> None:
    """What is called to make a connection."""


def introduce(agent: Agent, members: Sequence[Member]) -> None:
    """Connect to the members of a dynamic group that this worker joins, and wait until that has succeeded or
    failed.
    """
    calls = []
    for member in members:
        try:
            calls.append(agent.caller.call(member.name, noop, (), {}, UNSET_TIMEOUT))
        except WorkerLostError as error:
            logger.info("left out of the group: %s", error)
    for call in calls:
        try:
            call.result()
        except WorkerLostError as error:
            logger.info("left out of the group: %s", error)
        except RpcTimeoutError as error:
            logger.warning("a worker does not answer: %s", error)


class AgentNeighbours:
    """``Neighbours`` of an agent that has joined its group. From any thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def roster(self) -> Sequence[Member]:
        return self._agent.view.present()

    def has_met(self, incarnation: int) -> bool:
        peer = self._agent.peer_by_incarnation(incarnation)
        return peer is not None and (peer.connected or peer.session.connections > 0)

    def gone_reason(self, incarnation: int) -> str | None:
        return self._agent.view.gone_reason(incarnation)

    def meet(self, members: Sequence[Member]) -> None:
        def admit() -> None:
            for member in members:
                self._admit(member)

        self._on_loop(admit)

    def put_out(self, reason: str) -> None:
        self._on_loop(lambda: self._lose_all(reason))

    def _admit(self, member: Member) -> None:
        try:
            if self._agent.view.join(member):
                self._agent.peers.watch_over(self._agent.peers.ensure(member))
        except WorkerLostError:
            pass  # it is still in the log
        except GroupMismatchError as error:
            logger.warning("worker '%s' cannot be let in: %s", member.name, error)

    def _lose_all(self, reason: str) -> None:
        self._agent.connections.stop_listening()
        for peer in self._agent.peers.all():
            if not peer.is_self:
                self._agent.connections.lose(peer, reason)

    def _on_loop(self, function: Callable[[], Any]) -> None:
        try:
            self._agent.on_loop(function)
        except RuntimeError:
            if not self._agent.closed:
                raise

"""Tensors of one process that other processes fetch, by an agent beside any that the program has.

The agents of a job of Ray are one group without a store. The process that fetches learns where the other
listens from the tensors' metadata, which Ray delivers. So no agent is started before a process offers or
fetches its first tensor, and none connects to processes that it has no business with.
"""

from __future__ import annotations

import atexit
import secrets
import threading
from dataclasses import dataclass
from typing import Any, Final

import torch

import rpc  # noqa: F401  # whole, before its parts: several threads may import them at once
from rpc.agent.agent import Agent
from rpc.agent.futures import Future
from rpc.errors import RpcError
from rpc.group.workers import Member
from rpc.lifecycle.own_backend import admit, start_storeless_agent
from rpc.options import AgentOptions

__all__ = ["Exchange", "Meeting", "exchange_of"]

_REGISTER_LOCK: Final = threading.Lock()
_exchanges: dict[Meeting, Exchange] = {}


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the processes of one job share.

    Attributes:
        group: key of their group.
        token: proves that a process belongs to the job.
    """

    group: str
    token: str

    @classmethod
    def new(cls) -> Meeting:
        """That of a new job."""
        return cls(f"ray-{secrets.token_hex(8)}", secrets.token_urlsafe())


def exchange_of(meeting: Meeting, host: str) -> Exchange:
    """The exchange of this process, which is made at the first call.

    Args:
        meeting: of the job.
        host: address at which processes of other hosts reach this one.
    """
    with _REGISTER_LOCK:
        if meeting not in _exchanges:
            _exchanges[meeting] = Exchange(meeting, host)
        return _exchanges[meeting]


class Exchange:
    """The tensors that this process offers to the others of a job, and its access to theirs.

    All methods may be called from any thread.
    """

    def __init__(self, meeting: Meeting, host: str) -> None:
        self._meeting = meeting
        self._offered: dict[str, list[torch.Tensor]] = {}
        options = AgentOptions(listen=host, token=meeting.token)
        self._agent: Agent = start_storeless_agent(f"ray-{secrets.token_hex(8)}", meeting.group, options)
        atexit.register(self._agent.close, "its process has ended")

    @property
    def me(self) -> list[Any]:
        """What others need to reach this process."""
        return self._agent.group.peers.view.me.to_wire()

    def offer(self, key: str, tensors: list[torch.Tensor]) -> None:
        """Let others fetch tensors under a key, until they are withdrawn. They are sent as they are then."""
        self._offered[key] = tensors

    def withdraw(self, key: str) -> None:
        """Offer tensors no longer."""
        self._offered.pop(key, None)

    def offered(self, key: str) -> list[torch.Tensor]:
        """The tensors under a key.

        Raises:
            RpcError: they have been withdrawn.
        """
        try:
            return self._offered[key]
        except KeyError:
            raise RpcError(f"the tensors of object {key} have been freed by their owner") from None

    def fetch(self, source: list[Any], key: str, timeout: float) -> Future[list[torch.Tensor]]:
        """Begin to fetch tensors; they are this process's own.

        Args:
            source: what ``me`` of the other process is.
            key: under which it offers them.
            timeout: in seconds.

        Raises:
            WorkerLostError: the other process has ended.
        """
        member = Member.from_wire(source)
        admit(self._agent, member)
        return self._agent.call_async(member.name, _offered, (self._meeting.group, key), {}, timeout)


def _offered(group: str, key: str) -> list[torch.Tensor]:
    """What is called in the process that offers tensors."""
    for meeting, exchange in list(_exchanges.items()):
        if meeting.group == group:
            return exchange.offered(key)
    raise RpcError(f"this process offers nothing in the group {group}")

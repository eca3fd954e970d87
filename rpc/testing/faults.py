"""Faults on purpose: what this worker sends fails, is late, vanishes, comes twice, or breaks the connection.

``Faults`` has the rules, and decides what happens to a message: pure, and the same for the same seed and the
same messages. ``FaultyConnection`` stands between a worker's code and any connection, over sockets or in
memory, and does it. The messages are those of ``docs/protocol.md``: a connection keeps what it is given in
order and loses nothing, so *drop* and *duplicate* are what no byte stream does by itself. They show what the
parts above rely on.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from struct import Struct
from typing import Any, Final, Literal, Protocol, Self, cast

from rpc.agent.agent import Agent
from rpc.bulk.shared_memory.packing import unpack
from rpc.errors import RpcError
from rpc.group.peer import Peer
from rpc.runtime.current import current_agent
from rpc.transport.base import INFINITE, Connection, ConnectionClosed, ConnectionOwner, QueueFull
from rpc.wire.frames import Frame, Kind, decode_one

__all__ = ["KINDS", "Fault", "Faults", "FaultyConnection", "InjectedFaultError", "Sender"]

KINDS: Final = {
    **{name.lower(): kind for name, kind in vars(Kind).items() if name.isupper() and name != "EXTENSION"},
    "create": 32,
    "fetch": 33,
    "invoke": 34,
    "mark": 48,
    "gradients": 49,
    "abort": 51,
    "over": 52,
    "part": 53,
    "whole_part": 54,
}
"""Kinds of messages by name. Those from 32 on are references' and distributed autograd's."""

_HEAD: Final = Struct("<QQIIB")
_SENT_AGAIN_SECONDS: Final = 0.05
_SENT_ONCE: Final = frozenset((Kind.CONTROL, Kind.SEGMENTS, Kind.IN_SEGMENT))
_NOT_REQUESTS: Final = frozenset((Kind.REPLY, Kind.FAILURE, Kind.BULK, Kind.BULK_CREDIT, Kind.BULK_CLOSE))


class InjectedFaultError(RpcError):
    """A message was not sent because a rule says so."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one message. A delay takes ``seconds``; who fails does so ``attempts`` times."""

    action: Literal["fail", "delay", "drop", "duplicate", "cut"]
    seconds: float = 0.0
    attempts: int = 1


@dataclass(eq=False)
class Rule:
    """Which messages a fault befalls, and how many it has: ``struck``."""

    fault: Fault
    kind: int | None
    said: tuple[str, str] | None
    """Of a control message: its topic, and the first word of its body."""
    to: str | None
    what: Callable[[str], bool] | None
    times: float
    skip: int
    probability: float
    struck: int = field(default=0, init=False)

    def matches(self, frame: Callable[[], Frame], kind: int, to: str, asked: Callable[[], str]) -> bool:
        """Whether it is for this message."""
        return (
            (self.kind is None or self.kind == kind)
            and (self.to is None or self.to == to)
            and self.struck < self.times
            and (self.what is None or self.what(asked()))
            and (self.said is None or self.said in _said(frame()))
        )


class Faults:
    """Rules for what this worker sends, as a context manager; a message meets the first that is for it.

    From any thread. Rules are made by ``fail``, ``delay``, ``drop``, ``duplicate`` and ``cut``, which return
    them (``struck`` counts what they befell) and take the same arguments:

    Args:
        kind: of the messages, by its name in ``KINDS``; or ``"TOPIC.WORD"`` for control messages, such as
            ``"rref.delete"``; None for all.
        to: the name of the receiver; None for all.
        what: only what asks for this: a function's qualified name, or a predicate on the text.
        times: to how many messages it happens; default: all.
        skip: that many go through first.
        probability: of its happening to one that it is for.

    ``Faults(seed=...)`` makes what is left to probability repeatable.

    Example::

        with Faults() as faults:                        # of this process's agent, until the end of the block
            faults.delay("call", seconds=0.5, to="worker1")
            lost = faults.drop("reply", times=1)
            rpc.rpc_sync("worker1", work)
        assert lost.struck == 0                         # this worker has answered nobody
    """

    def __init__(self, seed: int = 0) -> None:
        self.rules: list[Rule] = []
        self._chance = random.Random(seed)
        self._agent: Agent | None = None

    def fail(self, kind: str | None = None, *, attempts: int = 1, **which: Any) -> Rule:
        """Sending fails: a request ends with ``InjectedFaultError``. What must arrive, and has no answer, is
        sent again after ``attempts`` failures and a pause that doubles, 50 ms at first; so are answers.
        """
        return self._add(Fault("fail", attempts=attempts), kind, **which)

    def delay(self, kind: str | None = None, *, seconds: float, **which: Any) -> Rule:
        """It is sent ``seconds`` later; what is sent meanwhile overtakes it."""
        return self._add(Fault("delay", seconds), kind, **which)

    def drop(self, kind: str | None = None, **which: Any) -> Rule:
        """It is never sent, and nobody is told: what waits for it waits, also at a graceful shutdown. Memory
        that it lends stays lent until the peer is gone.
        """
        return self._add(Fault("drop"), kind, **which)

    def duplicate(self, kind: str | None = None, **which: Any) -> Rule:
        """It is sent twice, as sessions never do: for code that calls or is called. Control messages and what
        shares memory, which rely on sessions, are sent once.
        """
        return self._add(Fault("duplicate"), kind, **which)

    def cut(self, kind: str | None = None, **which: Any) -> Rule:
        """The connection is closed without a goodbye in its stead."""
        return self._add(Fault("cut"), kind, **which)

    def _add(
        self,
        fault: Fault,
        kind: str | None,
        *,
        to: str | None = None,
        what: str | Callable[[str], bool] | None = None,
        times: float = INFINITE,
        skip: int = 0,
        probability: float = 1.0,
    ) -> Rule:
        topic, dot, word = (kind or "").partition(".")
        if kind is not None and not dot and kind not in KINDS:
            raise ValueError(f"there is no kind of message {kind!r}: there are {', '.join(KINDS)}")
        rule = Rule(
            fault,
            Kind.CONTROL if dot else None if kind is None else KINDS[kind],
            (topic, word) if dot else None,
            to,
            what.__eq__ if isinstance(what, str) else what,
            times,
            skip,
            probability,
        )
        self.rules.append(rule)
        return rule

    def decide(
        self, kind: int, to: str, asked: Callable[[], str] = str, frame: Callable[[], Frame] | None = None
    ) -> Fault | None:
        """What happens to a message.

        Args:
            kind: of its frame.
            to: the receiver's name.
            asked: what it asks for; called if a rule wants to know, as is ``frame``.
        """
        for rule in self.rules:
            if rule.matches(frame or _no_frame, kind, to, asked):
                if rule.skip > 0:
                    rule.skip -= 1
                elif rule.probability >= 1 or self._chance.random() < rule.probability:
                    rule.struck += 1
                    return rule.fault
        return None

    # ---- on an agent

    def __enter__(self) -> Self:
        self.install(current_agent())
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def install(self, agent: Agent) -> None:
        """Have an agent meet these faults, until ``remove``. ``RpcError`` if it meets others."""
        if agent.group.connections.is_equipped:
            raise RpcError("this agent has faults already: remove them first, or add rules to them")
        self._agent = agent
        agent.group.on_loop(self._begin, agent)

    def remove(self) -> None:
        """From now on everything is sent; what is delayed comes when it would have."""
        agent, self._agent = self._agent, None
        if agent is not None and not agent.closed:
            agent.group.on_loop(self._end, agent)

    def _begin(self, agent: Agent) -> None:
        def outfit(peer: Peer, connection: Connection) -> Connection:
            return FaultyConnection.between(connection, self, _AgentSender(agent, peer))

        agent.group.connections.equip(outfit)
        for peer in agent.group.peers.all():
            if peer.connection is not None:
                peer.send_by(outfit(peer, peer.connection))

    @staticmethod
    def _end(agent: Agent) -> None:
        agent.group.connections.equip(None)
        for peer in agent.group.peers.all():
            if isinstance(peer.connection, FaultyConnection):
                peer.send_by(peer.connection.inner)


def _no_frame() -> Frame:
    return Frame(0, 0, {}, [])


def _said(frame: Frame) -> list[tuple[str, str]]:
    """What the messages in a control frame say: topic and first word of each."""
    match frame.header.get("batch"):
        case [_, list(messages)]:
            return [(topic, str(body[0])) for topic, body in messages if isinstance(body, list) and body]
    return []


class Sender(Protocol):
    """Who sends on a connection with faults. From any thread."""

    to: str
    """The receiver's name."""

    def asked(self, call_id: int) -> str:
        """What a request asks for, for people; empty if it is none."""

    def fail(self, call_id: int, error: BaseException) -> bool:
        """End a request that cannot be sent; false if there is none of that id."""

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Call a function on the loop's thread."""


class _AgentSender:
    def __init__(self, agent: Agent, peer: Peer) -> None:
        self.to = peer.name
        self._agent = agent
        self._peer = peer

    def asked(self, call_id: int) -> str:
        call = self._agent.calls.table.find(call_id)
        return "" if call is None or call.peer is not self._peer else call.asked

    def fail(self, call_id: int, error: BaseException) -> bool:
        call = self._agent.calls.table.find(call_id)
        if call is None or call.peer is not self._peer:
            return False
        if self._agent.calls.caller.drop(call) and call.settle(error) and call.future is not None:
            self._agent.calls.caller.complete_soon(call.future)
        return True

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        self._agent.mailbox.later(seconds, function)


class FaultyConnection:
    """A connection on which what is sent meets faults; otherwise it is the connection ``inner``, which has
    all that ``Connection`` asks for.

    Example, in memory::

        network = MemoryNetwork()
        ...
        faulty = FaultyConnection.between(network.ends[0], faults, sender)
    """

    def __init__(self, inner: Connection, faults: Faults, sender: Sender) -> None:
        self.inner = inner
        self._faults = faults
        self._sender = sender

    @classmethod
    def between(cls, inner: Connection, faults: Faults, sender: Sender) -> Connection:
        """A connection for whoever sends."""
        return cast("Connection", cls(inner, faults, sender))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def owner(self) -> ConnectionOwner:
        return self.inner.owner

    @owner.setter
    def owner(self, owner: ConnectionOwner) -> None:
        self.inner.owner = owner

    def send(self, buffers: Sequence[Any], size: int, **how: Any) -> None:
        fault = self._decide(buffers)
        if fault is None:
            self.inner.send(buffers, size, **how)
        else:
            self._strike(fault, buffers)

    def send_small(self, frame: bytes, wait: float, **how: Any) -> None:
        fault = self._decide((frame,))
        if fault is None:
            self.inner.send_small(frame, wait, **how)
        else:
            self._strike(fault, (frame,))

    def _decide(self, buffers: Sequence[Any]) -> Fault | None:
        _, call_id, _, _, kind = _HEAD.unpack_from(buffers[0])

        def frame() -> Frame:
            return decode_one(bytearray().join(buffers))

        if kind == Kind.IN_SEGMENT:
            kind = unpack(frame().buffers[0]).kind
        return self._faults.decide(kind, self._sender.to, partial(self._sender.asked, call_id), frame)

    def _strike(self, fault: Fault, buffers: Sequence[Any]) -> None:
        _, call_id, _, _, kind = _HEAD.unpack_from(buffers[0])
        data = b"".join(buffers)
        match fault.action:
            case "drop":
                pass
            case "delay":
                self._sender.later(fault.seconds, partial(self._send, data))
            case "duplicate":
                self._send(data)
                if kind not in _SENT_ONCE:
                    self._send(data)
            case "cut":
                self._sender.later(0, partial(self.inner.close, "the connection was cut, as a test wants it"))
            case "fail":
                error = InjectedFaultError(
                    f"sending a message to worker '{self._sender.to}' failed, as a test wants it"
                )
                if kind in _NOT_REQUESTS or not self._sender.fail(call_id, error):
                    pauses = _SENT_AGAIN_SECONDS * (2**fault.attempts - 1)
                    self._sender.later(pauses, partial(self._send, data))

    def _send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionClosed, QueueFull):
            self.inner.send((data,), len(data), wait=0)

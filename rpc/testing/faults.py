"""Fault injection: messages of this worker fail, are late, vanish, are sent twice, or their connection is
cut.

``Faults`` has the rules, and decides what happens to a message: pure. ``FaultyConnection`` wraps any
connection, over sockets or in memory, and carries out the decisions. The messages are those of
``docs/protocol.md``. A connection keeps what it is given in order and loses nothing, so *drop* and
*duplicate* do what no byte stream does by itself, and show what the layers above rely on.
"""

from __future__ import annotations

import contextlib
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

KINDS: Final[dict[str, int]] = {
    name.lower(): kind for name, kind in vars(Kind).items() if name.isupper() and name != "EXTENSION"
}
"""The agent's own kinds of messages, by name."""

_HEAD: Final = Struct("<QQIIB")
_SENT_AGAIN_SECONDS: Final = 0.05
_SENT_ONCE: Final = frozenset((Kind.CONTROL, Kind.SEGMENTS, Kind.IN_SEGMENT))
_NOT_REQUESTS: Final = frozenset((Kind.REPLY, Kind.FAILURE, Kind.BULK, Kind.BULK_CREDIT, Kind.BULK_CLOSE))


class InjectedFaultError(RpcError):
    """A message was not sent because a rule says so."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault of one message: a delay takes ``seconds``, and sending fails ``attempts`` times."""

    action: Literal["fail", "delay", "drop", "duplicate", "cut"]
    seconds: float = 0.0
    attempts: int = 1


@dataclass(eq=False)
class Rule:
    """A fault, the messages that it applies to, and the number of messages that had it: ``struck``."""

    fault: Fault
    kind: int | None
    said: tuple[str, str] | None
    """Topic of a control message, and the first word of its body."""
    to: str | None
    what: Callable[[str], bool] | None
    times: float
    skip: int
    struck: int = field(default=0, init=False)

    def matches(self, frame: Callable[[], Frame], kind: int, to: str, asked: Callable[[], str]) -> bool:
        """Whether it applies to this message."""
        return (
            (self.kind is None or self.kind == kind)
            and (self.to is None or self.to == to)
            and self.struck < self.times
            and (self.what is None or self.what(asked()))
            and (self.said is None or self.said in _said(frame()))
        )


class Faults:
    """Rules for what this worker sends, as a context manager; the first rule that applies to a message is
    used.

    From any thread. Rules are made by ``fail``, ``delay``, ``drop``, ``duplicate`` and ``cut``, which return
    them (``struck`` counts the affected messages) and take the same arguments:

    Args:
        kind: kind of the messages: its name in ``KINDS``; its number, such as ``rref.requests.CREATE``, if it
            is another package's; or ``"TOPIC.WORD"`` for control messages, such as ``"rref.delete"``; None
            for all.
        to: name of the receiver; None for all.
        what: what the message asks for: a function's qualified name, or a predicate on the text; None for
            all.
        times: maximum number of messages that are affected; default: all.
        skip: number of messages that are let through first.

    Example::

        with Faults() as faults:                        # of this process's agent, until the end of the block
            faults.delay("call", seconds=0.5, to="worker1")
            lost = faults.drop("reply", times=1)
            rpc.rpc_sync("worker1", work)
        assert lost.struck == 0                         # this worker has answered nobody
    """

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self._agent: Agent | None = None

    def fail(self, kind: str | int | None = None, *, attempts: int = 1, **which: Any) -> Rule:
        """Make sending fail: a request ends with ``InjectedFaultError``. Answers, and messages that must
        arrive and have no answer, are sent again after ``attempts`` failures and a pause that doubles, 50 ms
        at first.
        """
        return self._add(Fault("fail", attempts=attempts), kind, **which)

    def delay(self, kind: str | int | None = None, *, seconds: float, **which: Any) -> Rule:
        """Send messages ``seconds`` later; what is sent meanwhile overtakes them."""
        return self._add(Fault("delay", seconds), kind, **which)

    def drop(self, kind: str | int | None = None, **which: Any) -> Rule:
        """Do not send messages. Nothing is notified: what waits for them waits, also at a graceful shutdown,
        and memory that they lend stays lent until the peer is gone.
        """
        return self._add(Fault("drop"), kind, **which)

    def duplicate(self, kind: str | int | None = None, **which: Any) -> Rule:
        """Send messages twice, which sessions never do, for tests of calling and called functions. Control
        messages and messages in shared memory, which rely on sessions, are sent once.
        """
        return self._add(Fault("duplicate"), kind, **which)

    def cut(self, kind: str | int | None = None, **which: Any) -> Rule:
        """Close the connection, without a goodbye, in place of sending."""
        return self._add(Fault("cut"), kind, **which)

    def _add(
        self,
        fault: Fault,
        kind: str | int | None,
        *,
        to: str | None = None,
        what: str | Callable[[str], bool] | None = None,
        times: float = INFINITE,
        skip: int = 0,
    ) -> Rule:
        topic, dot, word = kind.partition(".") if isinstance(kind, str) else ("", "", "")
        number = KINDS.get(kind) if isinstance(kind, str) else kind
        if isinstance(kind, str) and not dot and number is None:
            raise ValueError(f"there is no kind of message {kind!r}: there are {', '.join(KINDS)}")
        rule = Rule(
            fault,
            Kind.CONTROL if dot else number,
            (topic, word) if dot else None,
            to,
            what.__eq__ if isinstance(what, str) else what,
            times,
            skip,
        )
        self.rules.append(rule)
        return rule

    def decide(
        self, kind: int, to: str, asked: Callable[[], str] = str, frame: Callable[[], Frame] | None = None
    ) -> Fault | None:
        """Decide what happens to a message.

        Args:
            kind: kind of its frame.
            to: the receiver's name.
            asked: returns what it asks for; called if a rule needs it.
            frame: returns its frame; called if a rule needs it.
        """
        for rule in self.rules:
            if rule.matches(frame or _no_frame, kind, to, asked):
                if rule.skip == 0:
                    rule.struck += 1
                    return rule.fault
                rule.skip -= 1
        return None

    # ---- on an agent

    def __enter__(self) -> Self:
        self.install(current_agent())
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def install(self, agent: Agent) -> None:
        """Apply these faults to what an agent sends, until ``remove``. Raises ``RpcError`` if the agent has
        faults already.
        """
        if agent.group.connections.are_wrapped:
            raise RpcError("this agent has faults already: remove them first, or add rules to them")
        self._agent = agent
        agent.group.on_loop(self._begin, agent)

    def remove(self) -> None:
        """Apply no more faults; delayed messages are still sent when they are due."""
        agent, self._agent = self._agent, None
        if agent is not None and not agent.closed:
            agent.group.on_loop(self._end, agent)

    def _begin(self, agent: Agent) -> None:
        def wrap(peer: Peer, connection: Connection) -> Connection:
            return FaultyConnection.between(connection, self, _AgentSender(agent, peer))

        agent.group.connections.wrap_with(wrap)
        for peer in agent.group.peers.all():
            if peer.connection is not None:
                peer.send_by(wrap(peer, peer.connection))

    @staticmethod
    def _end(agent: Agent) -> None:
        agent.group.connections.wrap_with(None)
        for peer in agent.group.peers.all():
            if isinstance(peer.connection, FaultyConnection):
                peer.send_by(peer.connection.inner)


def _no_frame() -> Frame:
    return Frame(0, 0, {}, [])


def _said(frame: Frame) -> list[tuple[str, str]]:
    """Return topic and first word of each message in a control frame."""
    match frame.header.get("batch"):
        case [_, list(messages)]:
            return [(topic, str(body[0])) for topic, body in messages if isinstance(body, list) and body]
    return []


class Sender(Protocol):
    """The sender of a connection with faults. From any thread."""

    to: str
    """The receiver's name."""

    def asked(self, call_id: int) -> str:
        """Return what a request asks for, as text; empty if it is not a request."""

    def fail(self, call_id: int, error: BaseException) -> bool:
        """End a request that cannot be sent; false if there is none with that id."""

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
        if self._agent.calls.table.drop(call) and call.settle(error) and call.future is not None:
            self._agent.calls.table.complete_soon(call.future)
        return True

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        self._agent.mailbox.later(seconds, function)


class FaultyConnection:
    """A connection that applies faults to what is sent; otherwise it is the connection ``inner``, and has all
    methods of ``Connection``.

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
        """Wrap a connection."""
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

"""The memory transport on simulated time: latency, loss, half-open connections, partitions.

What a connection carries stays in order, as in a byte stream; what is lost is lost with its connection, from
some point on, and its two ends learn of that at different times, or one of them never. Such an end sends into
the void until somebody there answers by a reset. A message whose acknowledgement is lost so is sent again:
that is how messages come twice. Between the connections of a pair, and between pairs, everything overtakes
everything.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Final

from dist_autograd.backward_messages import GRADIENTS
from dist_autograd.contexts import OVER
from rpc.testing.faults import KINDS
from rpc.testing.memory_transport import Attempt, MemoryConnection, MemoryNetwork
from rpc.transport.base import Accepted
from rpc.wire.frames import Frame
from rref.requests import CREATE, FETCH, FETCHED, INVOKE
from tests.simulation.clock import Clock, WorkerLoop

__all__ = ["KIND_NAMES", "SimulatedNetwork"]

KIND_NAMES: Final = {kind: name for name, kind in KINDS.items()} | {
    CREATE: "create",
    FETCH: "fetch",
    FETCHED: "fetched",
    INVOKE: "invoke",
    GRADIENTS: "gradients",
    OVER: "over",
}

_AGAIN_SECONDS: Final = 1.0
"""How soon an attempt to connect into a partition is repeated, as TCP does."""
_KEEPALIVE_SECONDS: Final = 60.0
"""When a kernel ends a connection of which nothing more was heard, though nothing was sent."""


class SimulatedNetwork(MemoryNetwork):
    """All that is on its way between places, of which each has a loop.

    Attributes:
        latency: mean, in seconds; ``tail``: the share of messages that take a hundred times that.
        blocked: pairs of places, in order, between which nothing passes.
        silent: places whose host is gone: not even a refusal comes from there.
        sent: how many frames each place has sent, by kind.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.loops: dict[str, WorkerLoop] = {}
        self.latency = 0.001
        self.tail = 0.0
        self.blocked: set[tuple[str, str]] = set()
        self.silent: set[str] = set()
        self.sent: dict[str, Counter[int]] = defaultdict(Counter)
        self.say: Callable[[str], object] | None = None
        """Takes lines of the trace."""
        self._severed: set[MemoryConnection] = set()
        self._arrives: dict[MemoryConnection, float] = {}
        self._held: dict[tuple[str, str], list[Callable[[], object]]] = defaultdict(list)

    # ---- what moves

    def send(self, end: MemoryConnection, frame: Frame | None) -> None:
        source, lost = end.other, end in self._severed
        if frame is not None:
            self.sent[source.place][frame.kind] += 1
        if self.say is not None:
            what = "end" if frame is None else KIND_NAMES.get(frame.kind, str(frame.kind))
            self.say(f"    {source.place} -> {end.place}: {what}{', into the void' if lost else ''}")
        if lost:
            there = end.place
            if frame is not None and there not in self.silent and (source.place, there) not in self.blocked:
                self._reset(source)
            return
        end.inbox.append(frame)
        self._bring(end)

    def attempt(self, attempt: Attempt) -> None:
        super().attempt(attempt)
        self._later(attempt.place, self._delay(), self._try, attempt)

    def accept(self, accept: Accepted, end: MemoryConnection) -> None:
        self._later(end.place, 0.0, accept, end)

    def _try(self, attempt: Attempt) -> None:
        """It is the kernel there that answers: also when the process is stopped."""
        there = attempt.address.removeprefix("memory:")
        if (attempt.place, there) in self.blocked or (there, attempt.place) in self.blocked:
            self._later(attempt.place, _AGAIN_SECONDS, self._try, attempt)
        elif there not in self.silent:
            attempt()

    def _bring(self, end: MemoryConnection) -> None:
        """What was put last into the inbox arrives later, behind all before it."""
        at = self._arrives[end] = max(self._arrives.get(end, 0.0), self.clock.now + self._delay())
        self._later(end.place, at - self.clock.now, self._arrive, end)

    def _arrive(self, end: MemoryConnection) -> None:
        way = end.other.place, end.place
        if way in self.blocked:
            self._held[way].append(lambda: self._bring(end))
        elif end.inbox:
            if end.started or not end.open:
                end.deliver()
            else:
                self._bring(end)

    def _delay(self) -> float:
        chance = self.clock.chance
        delay = self.latency * (0.5 + chance.random())
        return delay * 100 if self.tail and chance.random() < self.tail else delay

    def _later(self, place: str, seconds: float, callback: Callable[..., object], *args: object) -> None:
        loop = self.loops.get(place)
        if loop is not None:
            loop.call_later(seconds, callback, *args)

    # ---- what goes wrong

    def live(self) -> list[MemoryConnection]:
        """One end of each connection that is open at both."""
        self.ends = [end for end in self.ends if end.open]
        found: dict[MemoryConnection, None] = {}
        for end in self.ends:
            if end.other.open and end.other not in found:
                found[end] = None
        return list(found)

    def cut(self, end: MemoryConnection, *, half: bool, loss: float = 0.7) -> None:
        """A connection breaks: of what is on its way something may still arrive. With ``half``, the other end
        does not learn of it.
        """
        for each in (end, end.other):
            while each.inbox and each.inbox[-1] is not None and self.clock.chance.random() < loss:
                each.inbox.pop()
            self._severed.add(each)
        self._reset(end)
        if half:
            self._later(end.other.place, _KEEPALIVE_SECONDS, self._reset, end.other)
        else:
            self._reset(end.other)

    def _reset(self, end: MemoryConnection) -> None:
        if end.open and None not in end.inbox:
            end.inbox.append(None)
            self._bring(end)

    def block(self, one: str, other: str) -> None:
        """Nothing passes from one place to the other, for now."""
        self.blocked.add((one, other))

    def lose(self, one: str, other: str) -> None:
        """What is on its way from one place to the other is lost."""
        for end in self.ends:
            if end.place == other and end.other.place == one:
                end.inbox.clear()

    def heal(self) -> None:
        """Everything passes again, and what was held comes."""
        self.blocked.clear()
        held, self._held = self._held, defaultdict(list)
        for each in held.values():
            for bring in each:
                bring()

    def kill(self, place: str, *, host: bool) -> None:
        """A process ends: its kernel closes its connections, unless the ``host`` is gone with it."""
        self.listeners.pop(place, None)
        if host:
            self.silent.add(place)
        for end in self.ends:
            if end.place == place:
                end.open = False
                if host:
                    self._severed.add(end)
                    self._later(end.other.place, _KEEPALIVE_SECONDS, self._reset, end.other)
                elif None not in end.other.inbox:
                    other = end.other
                    while other.inbox and self.clock.chance.random() < 0.3:
                        other.inbox.pop()
                    other.inbox.append(None)
                    self._bring(other)
                    self._severed.add(end)

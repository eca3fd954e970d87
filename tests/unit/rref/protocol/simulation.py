"""Workers that run the reference protocol over a network that does its worst, watched by one who sees all.

``Simulation`` plays the shells of all workers, their network, and the user programs. Nothing happens by
itself: each step is one call of a method (a message arrives, a worker dies, a reference is released ...),
so whoever drives it decides everything. It raises ``Violation`` as soon as

* an object is freed that a living worker can still reach: by a reference that has not failed, or by a
  message that it may still read; or freed twice, or while its creation runs;
* a reference fails, for the living, that has no right to: its owner lives, its creation was not given up
  and not lost with its creator, its message was not taken back;
* or, after ``drain``, anything is left: a reference without an answer, an object that nobody refers to,
  an entry in any worker's tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from rref.protocol.machine import Protocol
from rref.protocol.messages import Confirmed, Descriptor, Failed, Fence, Free, Peer, Ref, RRefId, Send, State


class Violation(AssertionError):
    """The protocol broke a promise."""


class Network:
    """Control messages on their way: each arrives once, in whatever order the driver likes. That it is so if
    connections break is for sessions and their tests.
    """

    def __init__(self) -> None:
        self.posted: list[tuple[Peer, Peer, Any]] = []

    def post(self, src: Peer, dst: Peer, message: Any) -> None:
        self.posted.append((src, dst, msgpack.unpackb(msgpack.packb(message))))

    def deliver(self, to: Simulation, index: int) -> None:
        """The message at ``index`` arrives."""
        to.receive(*self.posted.pop(index))

    def cut(self, src: Peer, dst: Peer) -> None:
        """What is on its way from ``src`` to ``dst`` is lost for ever: one of them is dead."""
        self.posted = [each for each in self.posted if each[:2] != (src, dst)]

    def deliver_all(self, to: Simulation) -> bool:
        """Deliver what there is; false if there was nothing."""
        any_posted = bool(self.posted)
        while self.posted:
            self.deliver(to, 0)
        return any_posted


@dataclass
class Object:
    """The truth about one object."""

    owner: Peer
    creator: Peer
    arrived: bool = False
    running: bool = False
    freed: bool = False
    given_up: bool = False
    """Its creator gave it up, or its creation was so late that it was given up for lost."""


@dataclass
class Call:
    """A message of a user program on its way: a call, a creation, or the answer to a creation."""

    src: Peer
    dst: Peer
    kind: str
    forks: list[Descriptor] = field(default_factory=list)
    rref: RRefId = (0, 0)
    ref: Ref = (0, 0)


@dataclass
class Worker:
    """One worker: its protocol, and what its shell and its program know."""

    me: Peer
    protocol: Protocol
    alive: bool = True
    refs: dict[Ref, RRefId] = field(default_factory=dict)
    creating: dict[Ref, tuple[Peer, RRefId]] = field(default_factory=dict)
    running: dict[RRefId, tuple[Peer, Ref]] = field(default_factory=dict)
    lost: set[Peer] = field(default_factory=set)


class Simulation:
    """All workers, their messages, and the truth about every object.

    Args:
        size: how many workers there are at first; their incarnations are 1, 2, 3 and so on.
    """

    def __init__(self, size: int) -> None:
        self.network = Network()
        self.workers: dict[Peer, Worker] = {}
        self.objects: dict[RRefId, Object] = {}
        self.calls: list[Call] = []
        for _ in range(size):
            self.join()

    # The group

    @property
    def living(self) -> list[Peer]:
        """The workers that live, whatever the others know."""
        return [peer for peer, worker in self.workers.items() if worker.alive]

    def join(self) -> Peer:
        """One worker more, announced to all before it takes part."""
        peer = len(self.workers) + 1
        new = Worker(peer, Protocol(peer))
        for other in self.workers.values():
            if other.alive:
                other.protocol.peer_joined(peer)
                new.protocol.peer_joined(other.me)
        self.workers[peer] = new
        for other_peer in list(self.workers):
            self._act(self.workers[other_peer])
        return peer

    def die(self, peer: Peer) -> None:
        """``peer`` dies. What it sent may still arrive, until the receiver notices."""
        self.workers[peer] = Worker(peer, Protocol(peer), alive=False)
        self.calls = [call for call in self.calls if call.dst != peer]
        for other in self.workers:
            self.network.cut(other, peer)

    def notice(self, peer: Peer, dead: Peer) -> None:
        """``peer`` finds that ``dead`` is: closes the link, discards what is unread, fails its own calls."""
        worker = self.workers[peer]
        worker.lost.add(dead)
        self.calls = [call for call in self.calls if (call.src, call.dst) != (dead, peer)]
        self.network.cut(dead, peer)
        self.network.cut(peer, dead)
        worker.protocol.peer_lost(dead, f"worker {dead} died")
        for ref, (owner, rref) in list(worker.creating.items()):
            if owner == dead:
                del worker.creating[ref]
                worker.protocol.creation_failed(owner, rref, ref, "its owner is lost")
        self._act(worker)

    def unnoticed(self) -> list[tuple[Peer, Peer]]:
        """All pairs of a living worker and a dead one that it does not know to be dead."""
        dead = [peer for peer, worker in self.workers.items() if not worker.alive]
        return [(peer, gone) for peer in self.living for gone in dead if gone not in self.workers[peer].lost]

    def break_link(self, one: Peer, other: Peer) -> None:
        """The connection between two living workers breaks: large calls on it are lost, and their senders
        learn of it. What is small, such as control messages, comes over the next.
        """
        lost = [call for call in self.calls if {call.src, call.dst} == {one, other}]
        self.calls = [call for call in self.calls if call not in lost]
        for call in lost:
            worker = self.workers[call.src]
            for fork in call.forks:
                worker.protocol.take_back(fork)
            creator = worker if call.kind == "create" else self.workers[call.dst]
            if call.kind != "call" and call.ref in creator.creating:
                self.give_up(creator.me, call.ref)
            self._act(worker)

    # The programs

    def own(self, peer: Peer) -> Ref:
        """``RRef(value)``."""
        worker = self.workers[peer]
        ref = worker.protocol.own()
        self.objects[ref] = Object(peer, peer, arrived=True)
        worker.refs[ref] = ref
        self._act(worker)
        return ref

    def create(self, peer: Peer, owner: Peer, args: Sequence[Ref] = ()) -> Ref:
        """``remote(owner, ..., args)``."""
        worker = self.workers[peer]
        rref, ref = worker.protocol.create(owner)
        self.objects[rref] = Object(owner, peer)
        worker.refs[ref] = rref
        if worker.protocol.state(ref) is not State.FAILED:
            worker.creating[ref] = (owner, rref)
            forks = [worker.protocol.fork(arg, owner) for arg in args]
            if self.workers[owner].alive:
                self.calls.append(Call(peer, owner, "create", forks, rref, ref))
        self._act(worker)
        return ref

    def give_up(self, peer: Peer, ref: Ref) -> None:
        """The creation that made ``ref`` times out."""
        worker = self.workers[peer]
        owner, rref = worker.creating.pop(ref)
        self.objects[rref].given_up = True
        worker.protocol.creation_failed(owner, rref, ref, "it timed out")
        self._act(worker)

    def finish(self, peer: Peer, rref: RRefId) -> None:
        """A creation has been run, and is answered."""
        worker = self.workers[peer]
        creator, ref = worker.running.pop(rref)
        self.objects[rref].running = False
        worker.protocol.finished(rref)
        self._act(worker)
        if self.workers[creator].alive and creator not in worker.lost:
            self.calls.append(Call(peer, creator, "answer", [], rref, ref))

    def call(self, peer: Peer, to: Peer, refs: list[Ref]) -> None:
        """A call (or the reply to one) with references in it."""
        worker = self.workers[peer]
        forks = [worker.protocol.fork(ref, to) for ref in refs]
        if to not in worker.lost and self.workers[to].alive:
            self.calls.append(Call(peer, to, "call", forks))
        elif to in worker.lost:
            for fork in forks:
                worker.protocol.take_back(fork)
        self._act(worker)

    def fail_to_send(self, peer: Peer, to: Peer, ref: Ref) -> None:
        """A call whose message is never written."""
        worker = self.workers[peer]
        worker.protocol.take_back(worker.protocol.fork(ref, to))
        self._act(worker)

    def expect(self, peer: Peer, rref: RRefId) -> None:
        """A fetch of an object reaches its owner."""
        worker = self.workers[peer]
        self._hold(worker, worker.protocol.expect(rref), rref)
        self._act(worker)

    def release(self, peer: Peer, ref: Ref) -> None:
        """A program drops a reference."""
        worker = self.workers[peer]
        del worker.refs[ref]
        worker.protocol.release(ref)
        self._act(worker)

    def release_all(self, peer: Peer) -> None:
        """A worker leaves in order."""
        worker = self.workers[peer]
        worker.refs.clear()
        worker.protocol.release_all()
        self._act(worker)

    def sweep(self, peer: Peer) -> None:
        """Enough time has passed for what is late to be given up."""
        worker = self.workers[peer]
        before = worker.protocol.counts()
        worker.protocol.sweep()
        after = worker.protocol.counts()
        if after["parked"] < before["parked"]:
            for truth in self.objects.values():
                truth.given_up = truth.given_up or (truth.owner == peer and not truth.arrived)
        self._act(worker)

    # Arrivals

    def arrive(self, index: int) -> None:
        """The call at ``index`` arrives."""
        call = self.calls.pop(index)
        worker = self.workers[call.dst]
        if call.kind == "answer":
            worker.creating.pop(call.ref, None)
            worker.protocol.created(call.src, call.rref, call.ref)
        for fork in msgpack.unpackb(msgpack.packb(call.forks)):
            self._hold(worker, worker.protocol.adopt(fork, call.src), tuple(fork[1]))
        if call.kind == "create" and worker.protocol.arrived(call.rref, call.ref, call.src):
            truth = self.objects[call.rref]
            if truth.arrived:
                raise Violation(f"creation {call.rref} is run twice")
            truth.arrived = truth.running = True
            worker.running[call.rref] = (call.src, call.ref)
        self._act(worker)

    def receive(self, src: Peer, dst: Peer, message: Any) -> None:
        """A control message arrives."""
        if self.hears(dst, src):
            self.workers[dst].protocol.receive(src, message)
            self._act(self.workers[dst])

    def hears(self, peer: Peer, src: Peer) -> bool:
        """Whether ``peer`` lives and has not lost ``src``."""
        return self.workers[peer].alive and src not in self.workers[peer].lost

    # The end

    def settle(self) -> None:
        """Let everything on its way arrive, everything running finish, every death be noticed."""
        busy = True
        while busy:
            busy = False
            for peer, dead in self.unnoticed():
                self.notice(peer, dead)
                busy = True
            while self.calls:
                self.arrive(0)
                busy = True
            for peer in self.living:
                for rref in list(self.workers[peer].running):
                    self.finish(peer, rref)
                    busy = True
            busy = self.network.deliver_all(self) or busy

    def drain(self) -> None:
        """Let all come to rest, then release all, and check that nothing is left."""
        self.settle()
        self._check_answers()
        for peer in self.living:
            for ref in list(self.workers[peer].refs):
                self.release(peer, ref)
        self.settle()
        if any(self.workers[peer].protocol.waits_for_sweep for peer in self.living):
            for _ in range(2):
                for peer in self.living:
                    self.sweep(peer)
                self.settle()
        for rref, truth in self.objects.items():
            if truth.arrived and not truth.freed and self.workers[truth.owner].alive:
                raise Violation(f"object {rref} is never freed: {truth}")
        for peer in self.living:
            if left := {kind: n for kind, n in self.workers[peer].protocol.counts().items() if n}:
                raise Violation(f"worker {peer} is left with {left}")

    def _check_answers(self) -> None:
        for peer in self.living:
            worker = self.workers[peer]
            for ref, rref in worker.refs.items():
                truth = self.objects[rref]
                state = worker.protocol.state(ref)
                if state is State.PENDING and not truth.given_up:
                    raise Violation(f"worker {peer} waits for an answer for {ref} for ever: {truth}")
                if state is State.CONFIRMED and truth.freed and not truth.given_up:
                    raise Violation(f"worker {peer} has {ref} to an object that is freed: {truth}")

    # What the shells do

    def _hold(self, worker: Worker, ref: Ref, rref: RRefId) -> None:
        worker.refs[ref] = rref
        if worker.protocol.state(ref) is State.FAILED:
            self._check_failure(worker, ref)

    def _act(self, worker: Worker) -> None:
        for action in worker.protocol.take_actions():
            match action:
                case Send(peer, message):
                    if peer in worker.lost:
                        raise Violation(f"worker {worker.me} says {message} to {peer}, which is lost")
                    if self.workers[peer].alive:
                        self.network.post(worker.me, peer, message)
                case Free(rref):
                    self._check_free(worker, rref)
                    self.objects[rref].freed = True
                case Failed(ref, _):
                    self._check_failure(worker, ref)
                case Confirmed(ref):
                    if worker.protocol.state(ref) is not State.CONFIRMED:
                        raise Violation(f"worker {worker.me} is told that {ref} is confirmed; it is not")
                case Fence(peer, _):
                    if self.workers[peer].alive:
                        raise Violation(f"worker {worker.me} is to cut off {peer}, which lives")

    def _check_free(self, worker: Worker, rref: RRefId) -> None:
        truth = self.objects[rref]
        never_came = not truth.arrived and not (truth.given_up and truth.creator == worker.me)
        if truth.owner != worker.me or never_came or truth.running or truth.freed:
            raise Violation(f"worker {worker.me} is told to free {rref}: {truth}")
        if not truth.given_up and (why := self._reached_by(rref)):
            raise Violation(f"object {rref} is freed, but {why}")

    def _reached_by(self, rref: RRefId) -> str:
        for worker in self.workers.values():
            if worker.alive:
                for ref, held in worker.refs.items():
                    if held == rref and worker.protocol.state(ref) is not State.FAILED:
                        return f"worker {worker.me} has {ref}, {worker.protocol.state(ref).name}"
        for call in self.calls:
            if any(fork[1] == rref for fork in call.forks):
                return f"a message from {call.src} to {call.dst} has it"
        return ""

    def _check_failure(self, worker: Worker, ref: Ref) -> None:
        truth = self.objects[worker.refs[ref]]
        never_came = not truth.arrived and not self.workers[truth.creator].alive
        owner_lives = self.workers[truth.owner].alive
        if owner_lives and not truth.given_up and not never_came:
            raise Violation(f"worker {worker.me}: {ref} fails, {worker.protocol.reason(ref)!r}: {truth}")

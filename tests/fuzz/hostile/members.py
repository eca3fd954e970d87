"""A real agent, in a process of its own, and peers that send it anything: strangers, members of its group.

An input is one connection: ``[who, item, item, ...]``. ``who`` is 0 for somebody who has said nothing, 1 for
one in the middle of a handshake, 2 for a member. An item is bytes, or a frame ``[kind, call id, header,
buffers, codec]``, in which some numbers stand for incarnations (``ME`` and so on). The agent's group has an
honest member, too, which works with it all the time; and it is in safe mode, for members may have others run
anything else.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import rpc
from rpc.runtime.current import current_agent
from rpc.serialization.codecs import NEUTRAL
from rpc.serialization.serializer import Serializer
from rpc.wire.frames import PREAMBLE, Kind, encode
from tests.fuzz.hostile import corpus
from tests.fuzz.hostile.mutation import Mutator, packed, unpacked
from tests.support.hostile import Hostile, Target, target
from tests.support.orders import add_follower, ask, dismiss, start_followers
from tests.support.workers import TIME_LIMIT, RunWorkers, WorkersFailed

__all__ = ["Attack", "Victim", "seeds"]

EVICTION: Final = [[Kind.CONTROL, 0, {"batch": [0, [["rref", ["fence", -1_000_003, "dead"]]]]}, [], 0]]
"""A member says that the honest one is dead."""

NAME: Final = "members"
"""Of the corpus."""
VICTIM_NAME: Final = "worker0"
ME: Final = -1_000_001
VICTIM: Final = -1_000_002
HONEST: Final = -1_000_003
GROWTH_MIB: Final = 400
"""By how much the agent may grow in all: one member may have it remember some 150 MB for two minutes."""
DEFECTS: Final = (
    *("deferred action", "Exception in callback", "Task exception", "an internal task failed"),
    "could not handle a message",
)
"""What a log says if something of ours has failed that no message may make fail."""
EVICTED: Final = "another worker found it gone"
PATIENCE: Final = 20.0
"""Seconds that the agent may take for what the honest member asks of it."""


# ---- the victim and the honest member


def count(words: str) -> int:
    """What members may call."""
    return len(words)


class Shelf:
    """What members may make, and refer to."""

    def __init__(self) -> None:
        self.things: list[Any] = []

    def put(self, thing: Any) -> int:
        self.things.append(thing)
        return len(self.things)


def allow() -> None:
    """At the victim: members may have it do this."""
    rpc.allow_function(count)
    rpc.allow_class(Shelf)
    rpc.allow_methods(Shelf, "put")


def state() -> dict[str, int]:
    """Of this worker."""
    rss = int((Path("/proc/self/statm")).read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    return {
        "RSS, MiB": rss,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def remembered() -> dict[str, int]:
    """What this worker knows of references, when what waits for late messages is given up."""
    agent = current_agent()
    references = agent.extensions["rref"]
    agent.group.on_loop(references._sweep)
    counts: dict[str, int] = references.counts()
    return {kind: number for kind, number in counts.items() if number}


def my_incarnation() -> int:
    """Of this worker."""
    incarnation: int = current_agent().incarnation
    return incarnation


def work() -> str:
    """At the honest member: use the victim; what is wrong."""
    try:
        assert rpc.rpc_sync(VICTIM_NAME, count, args=("words",), timeout=PATIENCE) == 5
        shelf = rpc.remote(VICTIM_NAME, Shelf, timeout=PATIENCE)
        assert shelf.rpc_sync(timeout=PATIENCE).put("a thing") == 1
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Victim:
    """The agent under attack, and the honest member, for at most so many seconds."""

    def __init__(self, run_workers: RunWorkers, seconds: float = TIME_LIMIT) -> None:
        self._workers = start_followers(
            run_workers, 1, seconds, dynamic=True, deserialization="safe", max_message_bytes=1 << 20
        )
        self.worker = self._workers[0]
        ask(self.worker, allow)
        self.evictions = 0
        self._begin_to_work()
        self.at: Target = ask(self.worker, target)
        self.before: dict[str, int] = ask(self.worker, state)

    def _begin_to_work(self) -> None:
        self.honest = add_follower(self._workers, dynamic=True, max_message_bytes=1 << 20)
        self.honest_incarnation: int = ask(self.honest, my_incarnation)

    def wrong(self) -> str:
        """What is wrong with the victim now: empty if nothing is."""
        try:
            complaint = self._complaint()
            now = ask(self.worker, state)
        except WorkersFailed as failure:
            return str(failure)
        if complaint:
            return f"the victim does not work: {complaint}"
        if now["RSS, MiB"] - self.before["RSS, MiB"] > GROWTH_MIB:
            return f"the victim has grown from {self.before['RSS, MiB']} to {now['RSS, MiB']} MiB"
        for words in DEFECTS:
            if words in self.log():
                return f"the victim's log says {words!r}"
        return ""

    def _complaint(self) -> str:
        complaint: str = ask(self.honest, work)
        if EVICTED in complaint:  # as any member may have it: another comes in its place
            self.honest.kill()
            self.evictions += 1
            self._begin_to_work()
            complaint = ask(self.honest, work)
        return complaint

    def left(self) -> str:
        """What the victim remembers of references when all members that attacked it are gone."""
        end = time.monotonic() + PATIENCE
        while any(found := [ask(each, remembered) for each in (self.honest, self.worker)]):
            if time.monotonic() > end:
                return f"the honest and the victim remember {found}"
            time.sleep(0.1)
        return ""

    def log(self) -> str:
        """What the victim has printed."""
        return self.worker.log.read_text(errors="replace")

    def dismiss(self) -> None:
        """Have both leave gracefully."""
        dismiss(self._workers)


# ---- inputs


def seeds() -> list[bytes]:
    """Connections that are well-formed, more or less."""
    calls = Serializer().between(peer_is_safe=True)
    other: Any = type("Other", (), {"name": VICTIM_NAME, "main": ""})()
    call = [bytes(each) for each in calls.dump_call(count, ("words",), {}, other).buffers]
    made = [bytes(each) for each in calls.dump_call(Shelf, (), {}, other).buffers]
    made[0] = (7).to_bytes(8, "little") + (8).to_bytes(8, "little") + made[0]
    value = [bytes(each) for each in calls.dumps(3, other).buffers]

    called = [Kind.CALL, 1, {}, call, NEUTRAL]

    def control(*messages: Any, acknowledged: int = 0) -> list[Any]:
        return [Kind.CONTROL, 0, {"batch": [acknowledged, list(messages)]}, [], 0]

    def said(*messages: Any) -> list[Any]:
        return control(*[["rref", message] for message in messages])

    hello = {"member": ["x", 1, ME, "h", [], "", 1, False], "wanted": VICTIM, "group": "g"}
    mine, theirs, others = [ME, 7], [VICTIM, 1], [HONEST, 1]
    member: list[list[Any]] = [
        [[Kind.CALL, 1, {}, call, NEUTRAL]],
        [[Kind.CALL, 2, {"rref": [[VICTIM, theirs, [ME, 3]], [HONEST, others, [ME, 4]]]}, call, NEUTRAL]],
        [[32, 1, {}, made, NEUTRAL], said(["delete", mine, [ME, 8]])],
        [said(["abandon", mine, "why"]), [32, 1, {}, made, NEUTRAL]],
        [
            [33, 1, {}, [(1).to_bytes(8, "little") * 2], 0],
            [34, 2, {"object": theirs, "method": "put"}, call, NEUTRAL],
        ],
        [
            [Kind.REPLY, 1, {}, value, NEUTRAL],
            [Kind.FAILURE, 2, {"!": ["x"], "type": "ValueError"}, value, NEUTRAL],
        ],
        [said(["fence", ME, "dead"])],
        [
            said(
                ["fence", 5, "dead"],
                ["bereaved", 5],
                ["bereaved", ME],
                ["cleared", HONEST],
                ["fenced", HONEST],
            )
        ],
        [said(["fence", VICTIM, "dead"])],
        [said(["confirm", theirs, [ME, 9]], ["confirm", mine, [ME, 9]], ["confirmed", [VICTIM, 2]])],
        [
            said(
                ["refused", [VICTIM, 3], "no"],
                ["accepted", [VICTIM, 4]],
            )
        ],
        [
            control(["call", ["cancel", 1]], ["cancel", 1], ["nobody", 1]),
            control(1, acknowledged=9),
        ],
        [[Kind.ALIVE, 1 << 40, {}, [], 1], [Kind.ALIVE, 0, {}, [], 2], [Kind.ARRIVED, 5, {}, [], 0]],
        [
            [Kind.SEGMENTS, 0, {"return": [1]}, [], 0],
            [Kind.SEGMENTS, 0, {"come": ["name", b"t" * 16, [1, 2]]}, [], 0],
        ],
        [[Kind.SEGMENTS, 0, {"ask": 1}, [], 0], [Kind.IN_SEGMENT, 0, {}, [bytes(40)], 0]],
        [
            [Kind.STREAMS, 0, {"streams": 2, "token": b"t" * 16}, [], 0],
            [Kind.STREAM, 0, {"token": b"t", "number": 1}, [], 0],
        ],
        [
            [Kind.BULK, 9, {}, [b"x"], 0],
            [Kind.BULK_CREDIT, 9, {}, [bytes(8)], 0],
            [Kind.BULK_CLOSE, 9, {}, [bytes(8)], 0],
        ],
        [
            [Kind.SHUTDOWN, 0, {"message": [0, "entered"]}, [], 0],
            [Kind.GOODBYE, 0, {"reason": "over"}, [], 0],
        ],
        [[Kind.OPENING, 3, {}, [bytes(28)], 0], [Kind.CHUNK, 3, {}, [bytes(70_000)], 0]],
        [
            [48, 1, {"autograd": [1, 2]}, value, NEUTRAL],
            [49, 1, {}, value, NEUTRAL],
            [51, 1, {}, value, NEUTRAL],
            [53, 1, {}, value, NEUTRAL],
        ],
    ]
    before: list[list[Any]] = [
        [0, [Kind.HELLO, 0, hello, [], 0], [Kind.PROOF, 0, {"nonce": b"n" * 32, "mac": b"m" * 32}, [], 0]],
        [0, [Kind.STREAM, 0, {"token": b"t" * 16, "number": 1}, [], 0], called],
        [0, b"GET / HTTP/1.1\r\n\r\n"],
        [
            1,
            [Kind.PROOF, 0, {"nonce": b"n" * 32, "mac": b"m" * 32}, [], 0],
            [Kind.CALL, 1, {}, call, NEUTRAL],
        ],
        [
            1,
            [Kind.WELCOME, 0, {"nonce": b"n" * 32, "mac": b"m" * 32}, [], 0],
            [Kind.CALL, 1, {}, call, NEUTRAL],
        ],
    ]
    return [packed([2, *each]) for each in member] + [packed(each) for each in before]


class Attack:
    """Sends inputs to a worker.

    Args:
        at: whom.
        honest: the incarnation of another member.
        seed: of what is mutated.
    """

    def __init__(self, at: Target, honest: int, seed: int = 0) -> None:
        self.at = at
        self.honest = honest
        self.mutator = Mutator(seed)
        self.pool = [*seeds(), *corpus.load(NAME)]
        self.sent: list[bytes] = []
        """Since it was last found well."""
        self.connections = 0
        self._names = 0

    def send_new(self, count: int) -> None:
        """Make ``count`` connections, with mutated inputs."""
        chance = self.mutator.chance
        for _ in range(count):
            data = self.mutator.of_values(chance.choice(self.pool), self.pool)
            if chance.random() < 0.02:
                self.pool[chance.randrange(len(self.pool))] = data
            self.send(data)

    def send(self, data: bytes) -> None:
        """One connection."""
        match unpacked(data):
            case [int(who), *items]:
                pass
            case _:
                return
        self.sent.append(data)
        self.connections += 1
        with contextlib.suppress(OSError, AssertionError), Hostile(self.at) as peer:
            peer.socket.settimeout(5.0)
            self._names += 1
            member = peer.newcomer(self._names)
            known = {ME: member.incarnation, VICTIM: self.at.member.incarnation, HONEST: self.honest}
            if who == 1:
                peer.say(peer.hello(member))
                peer.hear()
            elif who == 2:
                peer.join(member)
            for item in items:
                peer.say(_bytes_of(item, known, stranger=who == 0))
            peer.socket.shutdown(1)
            with contextlib.suppress(Exception):  # what it says need not be well-formed to this end
                peer.hear_all()

    def flood(self, seconds: float) -> int:
        """What members can say in so long of objects, forks and workers that nobody knows: how much."""
        end, said = time.monotonic() + seconds, 0
        for batches in _floods():
            with contextlib.suppress(OSError, AssertionError), Hostile(self.at) as peer:
                peer.socket.settimeout(5.0)
                self._names += 1
                member = peer.newcomer(self._names)
                peer.join(member)
                reader = threading.Thread(target=_hear_all, args=(peer,))
                reader.start()
                for messages in batches(member.incarnation):
                    header = {"batch": [0, [["rref", message] for message in messages]]}
                    peer.socket.sendall(b"".join(map(bytes, encode(Kind.CONTROL, 0, header, ())[0])))
                    said += len(messages)
                    if time.monotonic() > end:
                        break
                peer.socket.shutdown(1)
                reader.join(PATIENCE)
        return said


def _hear_all(peer: Hostile) -> None:
    with contextlib.suppress(Exception):
        peer.hear_all()


Batches = Callable[[int], Iterator[Sequence[Any]]]


def _floods() -> list[Batches]:
    """Endless batches of 500 messages, of several kinds."""

    def of(message: Callable[[int, int], list[Any]]) -> Batches:
        def batches(me: int) -> Iterator[Sequence[Any]]:
            number = 1
            while True:
                yield [message(me, number + each) for each in range(500)]
                number += 500

        return batches

    long = "why " * 100
    return [
        of(lambda me, number: ["confirm", [7, number], [me, number]]),
        of(lambda me, number: ["abandon", [me, number], long]),
        of(lambda me, number: ["refused", [me, number], long]),
        of(lambda me, number: ["fence", number, long]),
        of(lambda me, number: ["bereaved", number]),
    ]


def _bytes_of(item: Any, known: dict[int, int], *, stranger: bool) -> bytes:
    match item:
        case bytes():
            return item
        case [int(kind), int(call_id), dict(header), list(buffers), int(codec)]:
            pieces = [each if isinstance(each, bytes) else packed([each]) for each in buffers]
            try:
                framed = encode(
                    kind & 255, call_id & (1 << 64) - 1, _named(header, known), pieces, codec & 255
                )[0]
            except Exception:  # it cannot be said
                return b""
            data = b"".join(map(bytes, framed))
            return PREAMBLE + data if stranger and kind in (Kind.HELLO, Kind.STREAM) else data
    return packed([item])


def _named(value: Any, known: dict[int, int]) -> Any:
    if isinstance(value, list):
        return [_named(each, known) for each in value]
    if isinstance(value, dict):
        return {key: _named(each, known) for key, each in value.items()}
    return known.get(value, value) if type(value) is int else value

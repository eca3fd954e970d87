"""Strangers attack a worker that listens on TCP, from all sides at once, while members work.

::

    python -m tests.soak.strangers --seconds 60

Each stranger knows all but the token: who is there, the group, and what a member has said. They flood, stand
still in the middle of a handshake, repeat what members have said, turn the worker's own challenge against
it, cut messages short, announce much, and send noise. It prints what they got, what members noticed, and what
the worker has become; it fails if anybody got further than the challenge.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import secrets
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import rpc
from rpc.group.workers import Member
from rpc.runtime.current import current_agent
from rpc.wire.frames import PREAMBLE, Frame, Kind
from tests.support.hostile import Hostile, Target, frame, target

_PREFIX = struct.Struct("<QQIIB3x")
_PATIENCE = 10.0

ran: list[str] = []


def run(what: str) -> None:
    """What strangers would like to have called."""
    ran.append(what)


def state() -> dict[str, Any]:
    """Of the worker under attack."""
    agent = current_agent()
    return {
        "ran": list(ran),
        "largest RSS, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "handshaking": agent.group.connections.handshaking,
        "members": [info.name for info in rpc.get_worker_infos()],
    }


# ---- what strangers do


class Attack:
    """What one thread of strangers knows, and what they got."""

    def __init__(self, at: Target, recorded: bytes, seed: int) -> None:
        self.at = replace(at, authenticator=None)
        self.recorded = recorded
        self.chance = random.Random(seed)
        self.got: Counter[str] = Counter()
        self.held: list[socket.socket] = []

    def hello(self, member: Member) -> bytes:
        header = {"member": member.to_wire(), "wanted": self.at.member.incarnation, "group": self.at.group}
        return PREAMBLE + frame(Kind.HELLO, header, call_id=0)

    def call(self) -> bytes:
        name = __name__.encode()
        return frame(Kind.CALL, {}, [b"c" + name + b"\nrun\n(S'a call'\ntR."])

    def say(self, what: str, *said: bytes) -> None:
        with self.visit() as peer:
            peer.say(*said)
            if self.chance.random() < 0.5:
                with contextlib.suppress(OSError):
                    peer.socket.shutdown(socket.SHUT_WR)
            self.note(what, self.hear(peer))

    @contextlib.contextmanager
    def visit(self) -> Iterator[Hostile]:
        with Hostile(self.at, "tcp") as peer:
            peer.socket.settimeout(_PATIENCE)
            yield peer

    def hear(self, peer: Hostile) -> list[Frame]:
        try:
            return peer.hear_all()
        except OSError:
            return []

    def note(self, what: str, answers: list[Frame]) -> None:
        kinds = [answer.kind for answer in answers]
        if kinds not in ([], [Kind.CHALLENGE], [Kind.CHALLENGE, Kind.REFUSED]):
            self.got[f"{what}: GOT IN, heard {kinds}"] += 1
        told = str([answer.header for answer in answers])
        if self.at.group in told or str(self.at.member.incarnation) in told or "worker" in told:
            self.got[f"{what}: WAS TOLD {told}"] += 1
        self.got[f"{what}"] += 1

    # each of these is one move

    def guess(self) -> None:
        proof = frame(
            Kind.PROOF, {"nonce": secrets.token_bytes(32), "mac": secrets.token_bytes(32)}, call_id=0
        )
        self.say("a wrong proof", self.hello(self.newcomer()), proof, self.call())

    def call_at_once(self) -> None:
        self.say("a call without a handshake", PREAMBLE, self.call())

    def welcome_oneself(self) -> None:
        welcome = frame(Kind.WELCOME, {"nonce": bytes(32), "mac": bytes(32)}, call_id=0)
        self.say("a welcome to oneself", self.hello(self.newcomer()), welcome, self.call())

    def replay(self) -> None:
        self.say("what a member has said", self.recorded, self.call())

    def stream(self) -> None:
        stream = frame(Kind.STREAM, {"token": secrets.token_bytes(16), "number": 0}, call_id=0)
        self.say("a stream", PREAMBLE, stream, self.call())

    def reflect(self) -> None:
        """Give the challenge of one connection back on another, as one's own proof."""
        with self.visit() as first, self.visit() as second:
            for peer in (first, second):
                peer.say(self.hello(self.at.member))
            challenges = [peer.hear() for peer in (first, second)]
            for peer, other in ((first, challenges[1]), (second, challenges[0])):
                nonce = b"" if other is None else other.header.get("nonce", b"")
                peer.say(frame(Kind.PROOF, {"nonce": nonce, "mac": nonce}, call_id=0), self.call())
                self.note("the challenge given back", [*filter(None, challenges[:1]), *self.hear(peer)])

    def truncate(self) -> None:
        whole = self.recorded + self.call()
        self.say("a part of what a member has said", whole[: self.chance.randrange(len(whole))])

    def noise(self) -> None:
        self.say("noise", PREAMBLE, self.chance.randbytes(self.chance.randrange(1, 60_000)))

    def damage(self) -> None:
        data = bytearray(self.recorded)
        for _ in range(self.chance.randint(1, 4)):
            data[self.chance.randrange(len(data))] = self.chance.randrange(256)
        self.say("damaged", bytes(data), self.call())

    def announce(self) -> None:
        for header in (b"\x81\xa1k" + b"\xdd\x00\x00\xea\x60" * 1000, b"\x91" * 60_000):
            prefix = _PREFIX.pack(len(header), 0, len(header), 0, Kind.HELLO)
            self.say("a header of very many lists", PREAMBLE, prefix, header)

    def stand_still(self) -> None:
        """Begin a handshake and say no more."""
        with contextlib.suppress(OSError):
            peer = Hostile(self.at, "tcp")
            peer.say(self.hello(self.newcomer())[: self.chance.randrange(300)])
            self.held.append(peer.socket)
            self.got["standing still"] += 1
        if len(self.held) > 300:
            for sock in self.held:
                sock.close()
            self.held.clear()

    def flood(self) -> None:
        """Connect and hang up, many times."""
        for _ in range(50):
            with contextlib.suppress(OSError), self.visit():
                self.got["connected and hung up"] += 1

    def newcomer(self) -> Member:
        return replace(self.at.member, incarnation=secrets.randbits(62))

    def moves(self) -> list[Callable[[], None]]:
        return [
            self.guess,
            self.call_at_once,
            self.welcome_oneself,
            self.replay,
            self.stream,
            self.reflect,
            self.truncate,
            self.noise,
            self.damage,
            self.announce,
            self.flood,
            *[self.stand_still] * 10,
        ]


def strangers(at: Target, recorded: bytes, seconds: float, seed: int) -> Counter[str]:
    """Attack for so long, from several threads."""
    end = time.monotonic() + seconds
    attacks = [Attack(at, recorded, 100 * seed + number) for number in range(4)]

    def go_on(attack: Attack) -> None:
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                attack.chance.choice(attack.moves())()

    threads = [threading.Thread(target=go_on, args=(attack,)) for attack in attacks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum((attack.got for attack in attacks), Counter())


def what_a_member_says(at: Target) -> bytes:
    """All that goes out in a handshake that succeeds, as somebody on the network would see it."""
    said: list[bytes] = []

    class Recording(Hostile):
        def say(self, *data: bytes) -> None:
            said.extend(data)
            super().say(*data)

    with Recording(at, "tcp") as peer:
        peer.join(peer.newcomer(1))
    return b"".join(said)


# ---- the workers


def join(name: str, folder: str) -> None:
    """Join the group; the token is in the environment."""
    options = rpc.AgentOptions(init_method=f"file://{folder}/rendezvous", listen="127.0.0.1", dynamic=True)
    rpc.init_rpc(name, rpc_backend_options=options)


def work(rank: int, folder: str, seconds: float, results: Any) -> None:
    """Worker 0 is attacked, worker 1 works with it."""
    both = threading.Event()
    with rpc.on_worker_joined(lambda _: both.set()):
        join(f"worker{rank}", folder)
        assert both.wait(60)
    done = Path(folder) / "done"
    if rank == 0:
        while not done.exists():
            time.sleep(0.1)
        rpc.shutdown()
        return
    at = rpc.rpc_sync("worker0", target)
    recorded = what_a_member_says(at)
    before, quiet = rpc.rpc_sync("worker0", state), _times(2.0)
    context = get_context("spawn")
    with context.Pool(1) as pool:
        attack = pool.apply_async(strangers, (replace(at, authenticator=None), recorded, seconds, 1))
        attacked = _times(seconds)
        got = attack.get(seconds + 60)
    newcomer = context.Process(target=_come_late, args=(folder,))
    newcomer.start()
    newcomer.join(60)
    after = rpc.rpc_sync("worker0", state)
    results.put((got, before, after, quiet, attacked, newcomer.exitcode))
    done.touch()
    rpc.shutdown()


def _come_late(folder: str) -> None:
    """A member that comes when the strangers have been there."""
    join("late", folder)
    assert rpc.rpc_sync("worker0", state)["ran"] == []
    rpc.shutdown(graceful=False)


def _times(seconds: float) -> list[float]:
    """How long small calls take."""
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.perf_counter()
        rpc.rpc_sync("worker0", os.getpid)
        times.append(1e6 * (time.perf_counter() - begin))
        time.sleep(0.001)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description="Attack a worker as strangers do.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    seconds = parser.parse_args().seconds
    os.environ["FARCALL_TOKEN"] = secrets.token_urlsafe()
    context = get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory(prefix="farcall-strangers-") as folder:
        workers = [context.Process(target=work, args=(rank, folder, seconds, results)) for rank in (0, 1)]
        for worker in workers:
            worker.start()
        got, before, after, quiet, attacked, late = results.get(timeout=seconds + 120)
        for worker in workers:
            worker.join()
    for what, count in sorted(got.items()):
        print(f"{count:8} x {what}")
    print(f"small calls: {_described(quiet)} without strangers, {_described(attacked)} with")
    print(f"worker before: {before}\nworker after:  {after}\nexit of a member that came late: {late}")
    failed = after["ran"] or late or any("GOT IN" in what or "WAS TOLD" in what for what in got)
    print("FAILED" if failed else "nobody got in, nobody was told anything")
    return int(bool(failed))


def _described(times: list[float]) -> str:
    worst = sorted(times)[int(len(times) * 0.99)]
    return f"{statistics.median(times):.0f} us (99 %: {worst:.0f} us, {len(times)} calls)"


if __name__ == "__main__":
    raise SystemExit(main())

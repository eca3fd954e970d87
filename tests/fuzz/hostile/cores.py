"""What is fuzzed in this process: the pure parts that take in what others say, each with the rules it must
keep.

A ``Target`` takes an input and may raise what it names; anything else that it raises, ``Broken`` above all,
is a failure. Whoever says it all is a member who has proven to belong to the job, but where said.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch

from farcall.grpc.values import Malformed, from_value, to_value
from farcall.serving.tensors import TorchTensors
from farcall.v1 import value_pb2 as pb
from rpc.bulk.shared_memory import packing
from rpc.errors import ProtocolError, RpcError, SerializationError
from rpc.group.admission import judge
from rpc.group.handshake import Handshake, Hello, Refusal, Stream, Welcomed
from rpc.group.handshake import HandshakeMessage as Said
from rpc.group.membership import Membership
from rpc.group.workers import Member, WorkerInfo
from rpc.serialization.codecs import NEUTRAL
from rpc.serialization.safe import AllowList
from rpc.serialization.serializer import Serializer
from rpc.serialization.settings import Settings
from rpc.transport.authentication import Role, TokenAuthenticator
from rpc.transport.session import Session
from rpc.wire import reassembly
from rpc.wire.decoder import Decoder
from rpc.wire.frames import PREAMBLE, Kind, chunk_prefix, chunked, encode
from rpc.wire.headers import pack_header, unpack_header
from rref.protocol.machine import Protocol
from rref.protocol.messages import Fence, Free, Peer, Send, State
from tests.fuzz.hostile.mutation import packed, unpacked

__all__ = ["TARGETS", "Broken", "Target"]

LIMIT: Final = 300_000
"""Bytes of a frame."""


class Broken(AssertionError):
    """A rule was not kept."""


@dataclass(frozen=True)
class Target:
    """One part.

    Attributes:
        name: of its corpus.
        run: takes in an input.
        refuses: what ``run`` may raise.
        seeds: well-formed inputs to begin with.
        of_values: whether inputs are values in msgpack, and not bytes as such.
    """

    name: str
    run: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]
    seeds: Callable[[], Sequence[bytes]]
    of_values: bool = False


# ---- the wire


def run_frames(data: bytes) -> None:
    """A stream of frames, in chunks of sizes that depend on the stream."""
    with mock.patch("rpc.wire.decoder.allocate", _allocate_within_limit):
        _feed(Decoder(LIMIT), data)


def _allocate_within_limit(length: int) -> memoryview:
    if length > LIMIT:
        raise Broken(f"{length} bytes are allocated, where no frame may have more than {LIMIT}")
    return reassembly.allocate(length)


def _feed(decoder: Decoder, data: bytes) -> None:
    stream, step = memoryview(PREAMBLE + data), 1 + sum(data[:16]) * 7 % 4000
    while stream:
        room = decoder.buffers()[0]
        if not len(room):
            raise Broken("the decoder has no room and no frame")
        count = min(len(room), len(stream), step)
        room[:count] = stream[:count]
        for frame in decoder.received(count):
            header: object = frame.header
            if not isinstance(header, dict) or sum(map(len, frame.buffers)) > LIMIT:
                raise Broken(f"a frame beyond the limits: {frame.kind}")
        if decoder.arriving.promised < 0 or decoder.arriving.promised > 2 * LIMIT:
            raise Broken(f"{decoder.arriving.promised} bytes are promised")
        stream = stream[count:]


def seed_frames() -> list[bytes]:
    def one(*message: Any) -> bytes:
        return b"".join(map(bytes, encode(*message)[0]))

    opening = chunked(*encode(Kind.BULK, 0, {}, [b"x", b"y" * 70_000]), 7)
    pieces = bytes(opening.head) + chunk_prefix(7, 0, 65_536) + bytes(65_536)
    return [
        one(Kind.CALL, 1, {}, [b"pickle"]),
        one(Kind.CALL, 1, {"rref": [[1, [2, 3], [4, 5]]]}, [b"pickle", b"tensor" * 9, b""]),
        one(Kind.CONTROL, 0, {"batch": [0, [["rref", ["delete", [1, 2], [3, 4]]]]]}, []) * 2,
        one(Kind.ALIVE, 128, {}, []) + one(Kind.GOODBYE, 0, {"reason": "over"}, []),
        pieces[:4000],
        bytes(opening.head) + b"".join(chunk_prefix(7, 65_536 * n, 16) + bytes(16) for n in range(3)),
    ]


def run_header(data: bytes) -> None:
    """A header by itself."""
    header = unpack_header(memoryview(data))
    if not isinstance(header, dict):
        raise Broken(f"a header is a {type(header).__name__}")


def seed_headers() -> list[bytes]:
    return [
        pack_header({"batch": [0, [["rref", ["delete", [1, 2], [3, 4]]]]]}),
        pack_header({"member": ["worker0", 0, 1 << 62, "host", ["unix:@a"], "", 1 << 30], "wanted": 3}),
        pack_header({"none": None, "text": "\ud800", "deep": [[[[{"a": {}}]]]], "bytes": b"x" * 300}),
        b"\x81\xa1k" + b"\xdd\x00\x00\x04\x01" + b"\xc0" * 1025,
        b"\x81\xa1k" + b"\xdd\x00\x10\x00\x00",
        b"\x81\xa1k" + b"\x91" * 200,
    ]


def run_segment(data: bytes) -> None:
    """What stands in a frame for a message in shared memory."""
    packing.unpack(memoryview(data))


def seed_segments() -> list[bytes]:
    return [
        bytes(packing.pack(packing.Message(Kind.CALL, {"k": 1}, 1, 1, (5, 70_000), b"pickle"))),
        bytes(packing.pack(packing.Message(Kind.REPLY, {}, 1 << 60, 0, (), b""))),
    ]


# ---- values


def triple(x: Any) -> Any:
    """What safe mode lets others call."""
    return x


class Setting:
    """What safe mode lets others send."""

    def __init__(self, x: Any = None) -> None:
        self.x = x


@functools.cache
def _serializers() -> tuple[Serializer, Serializer]:
    allow = AllowList()
    allow.function(triple)
    allow.cls(Setting)
    settings = Settings()
    settings.allowed = allow
    return Serializer(Settings()), Serializer(settings, safe=True)


@dataclass
class _Other:
    name: str = "worker1"
    main: str = ""


def run_neutral(data: bytes) -> None:
    """What safe mode reads: a header, and buffers, of which the first is the message."""
    match unpacked(data):
        case [dict(header), *buffers] if all(isinstance(each, bytes) for each in buffers):
            pass
        case _:
            return
    safe = _serializers()[1]
    mutable = [memoryview(bytearray(each)) for each in buffers]
    other: Any = _Other()
    error = safe.load_exception(header, mutable, None, other, codec=NEUTRAL)
    if not isinstance(error, Exception):
        raise Broken(f"an exception that is a {type(error).__name__}")
    str(error)
    codec = safe.between(peer_is_safe=False)
    _look(codec.load_call, header, mutable, other)
    _look(codec.loads, header, mutable, other)


def _look(load: Any, *message: Any) -> None:
    header, buffers, source = message
    try:
        loaded = load(header, buffers, None, source)
    except SerializationError:
        return
    parts = [loaded]
    for part in parts:
        if isinstance(part, torch.Tensor) and part.layout is torch.strided and not part.is_meta:
            part.detach().reshape(-1)[:1].tolist()  # it must not reach beyond its memory
        elif isinstance(part, list | tuple) and len(parts) < 1000:
            parts.extend(part)


def seed_neutral() -> list[bytes]:
    plain, _ = _serializers()
    other: Any = _Other()
    shared = torch.arange(6)
    values: list[Any] = [
        *(None, 3, "text", b"bytes", [1, (2, {"a": {3}})], 1 << 100, 0.5, frozenset({1, (2, 3)})),
        *(torch.ones(3), torch.ones(2, 3, requires_grad=True), torch.arange(12).reshape(3, 4).t()[1:]),
        *(torch.zeros(0), torch.ones(2, 2).to_sparse(), torch.ones(2, 2).to_sparse_csr()),
        *(torch.empty(2, device="meta"), torch.ones(2, dtype=torch.complex64).conj(), [shared, shared]),
        *(torch.nn.Parameter(torch.ones(1)), Setting([1, 2]), torch.float32, torch.Size([1, 2])),
    ]
    codec = plain.between(peer_is_safe=True)
    payloads = [codec.dumps(value, other) for value in values]
    payloads += [codec.dump_call(triple, (torch.ones(2), 1), {"y": "z"}, other)]
    payloads += [
        codec.dump_call(Setting, ([1],), {}, other),
        plain.dump_exception(ValueError("bad"), "w", other, codec=NEUTRAL),
    ]
    return [packed([each.header, *(bytes(buffer) for buffer in each.buffers)]) for each in payloads]


def run_value(data: bytes) -> None:
    """A value of the gateway's, of strangers to Python."""
    try:
        message = pb.Value.FromString(data)
    except Exception:  # protobuf's own parser refuses it
        return
    to_value(from_value(message, TorchTensors()), TorchTensors())


def seed_values() -> list[bytes]:
    values = [None, True, -5, 0.5, "text", b"bytes", [1, [2, {"k": torch.ones(2, 3)}]], torch.zeros(0, 4)]
    values += [torch.ones(3, dtype=dtype) for dtype in (torch.bool, torch.bfloat16, torch.complex64)]
    return [to_value(value, TorchTensors()).SerializeToString() for value in values]


# ---- handshakes


_TOKEN: Final = TokenAuthenticator(b"a token of the job that is long enough")
_ME: Final = Member(WorkerInfo("worker0", 0), 1, "host", ("unix:@a",), "", 1 << 30)
_PROVEN: Final = "prove"


def run_handshake(data: bytes) -> None:
    """A handshake: the first message says whether the sender has the token, and which side it talks to.

    ``[kind, "prove"]`` is a proof, valid if the sender has the token.
    """
    match unpacked(data):
        case [[bool(has_token), bool(dialled), bool(static)], *said]:
            pass
        case _:
            return
    view = Membership(_ME, static=static)
    handshake = Handshake(Role.DIALLER if dialled else Role.ACCEPTOR, _TOKEN)
    if dialled:
        handshake.greet(Hello(_ME, 2, "group"))
    for each in said:
        match each:
            case [int(kind), header] if header == _PROVEN or isinstance(header, dict):
                pass
            case _:
                return
        if header == _PROVEN:
            role = Role.ACCEPTOR if dialled else Role.DIALLER
            header = {"nonce": b"\1" * 32, "mac": b"\2" * 32}
            if has_token:
                header = _TOKEN.prove(role, handshake._said.digest())
        answer = handshake.receive(kind, header)
        if isinstance(answer, Hello | Stream | Welcomed) and not has_token:
            raise Broken(f"somebody without the token is heard: {answer}")
        if isinstance(answer, Hello):
            refusal = judge(answer, view, "group", connected=False, connecting=False)
            if refusal is None:
                if static and answer.member.incarnation != _ME.incarnation:
                    raise Broken("somebody joins a static group")
                handshake.welcome((max(answer.session[0], 0) + 1, 0))
            else:
                pack_header(handshake.refuse(refusal).header)
        elif isinstance(answer, Stream):
            handshake.welcome()
        elif isinstance(answer, Refusal):
            if not dialled:
                handshake.refuse(answer)
            return
        elif isinstance(answer, Said):
            pack_header(answer.header)


def seed_handshakes() -> list[bytes]:
    member = ["worker9", 9, 9, "host", ["unix:@b", "tcp:127.0.0.1:1"], "", 1 << 30]
    hello = {"member": member, "wanted": 1, "group": "group"}
    return [
        packed([[True, False, False], [Kind.HELLO, hello], [Kind.PROOF, _PROVEN]]),
        packed([[True, False, True], [Kind.HELLO, hello | {"session": [3, 70]}], [Kind.PROOF, _PROVEN]]),
        packed([[False, False, False], [Kind.HELLO, hello], [Kind.PROOF, _PROVEN]]),
        packed(
            [[True, False, False], [Kind.STREAM, {"token": b"t" * 16, "number": 1}], [Kind.PROOF, _PROVEN]]
        ),
        packed([[True, True, False], [Kind.CHALLENGE, {"nonce": b"n" * 32}], [Kind.WELCOME, _PROVEN]]),
        packed([[True, True, False], [Kind.WELCOME, {"session": [2, 5]}]]),
        packed([[True, True, False], [Kind.REFUSED, {"code": "gone", "reason": "x"}]]),
        packed([[False, True, False], [Kind.CHALLENGE, {"nonce": b"n" * 32}], [Kind.WELCOME, _PROVEN]]),
    ]


# ---- sessions


def run_session(data: bytes) -> None:
    """What a member says of what it has taken in; ``["sent", n]`` is this side's doing."""
    session, sent = Session(), 0
    for each in unpacked(data):
        match each:
            case ["sent", int(count)] if 0 <= count < 1000:
                session.sent += [b"m%d" % number for number in range(sent, sent + count)]
                sent += count
            case ["large"]:
                session.begin_large(b"head")
            case ["acknowledged", int(count)]:
                session.acknowledged(count)
            case ["arrived", int(number)]:
                session.large.pop(number, None)
            case ["resume", int(count), int(unsent)] if 0 <= unsent < 10:
                session.connections += 1
                again = session.resume(count, [b"m%d" % number for number in range(sent, sent + unsent)])
                sent += unsent
                if again != [b"m%d" % number for number in range(count, sent)]:
                    raise Broken(f"{len(again)} messages are sent again after {count} of {sent}")
                session.sent += again
            case ["resumed"]:
                session.take_lost()
        if session.first + len(session.sent) != sent or session.first < 0:
            raise Broken(f"{session.first} + {len(session.sent)} of {sent} messages are known")


def seed_sessions() -> list[bytes]:
    return [
        packed([["sent", 5], ["acknowledged", 3], ["sent", 2], ["resume", 4, 2], ["acknowledged", 9]]),
        packed([["large"], ["large"], ["arrived", 1], ["resume", 0, 0], ["resumed"], ["resumed"]]),
    ]


# ---- references

_HOSTILE: Final = 9


class References:
    """Two members that refer to objects of each other's, and a third who says what he likes. What a shell
    would do is done at once.
    """

    def __init__(self) -> None:
        self.protocols = {1: Protocol(1), 2: Protocol(2)}
        self.freed: set[tuple[int, int]] = set()
        self.ending = self.apart = False
        """The two have lost each other, since the third said so."""
        for me, protocol in self.protocols.items():
            for peer in (3 - me, _HOSTILE):
                protocol.peer_joined(peer)
        self.held: list[tuple[Peer, Any]] = []
        """References of the honest to each other's objects."""
        self.owned: list[tuple[Peer, Any]] = []
        for me, protocol in self.protocols.items():
            other = 3 - me
            mine = protocol.own()
            self.owned.append((me, mine))
            there = self.protocols[other]
            self.held.append((other, there.adopt(list(protocol.fork(mine, other)), me)))
            protocol.fork(mine, _HOSTILE)
            _, ref = protocol.create(_HOSTILE)
            self.held.append((me, ref))
            protocol.fork(ref, other)
            self.act()

    def say(self, to: Peer, step: list[Any]) -> None:
        """What the third one does to one of the two."""
        protocol = self.protocols[to]
        match step:
            case ["message", message]:
                protocol.receive(_HOSTILE, message)
            case ["adopt", [1 | 2 | 9, *_] as descriptor]:  # the shell knows of no other owner
                ref = protocol.adopt(descriptor, _HOSTILE)
                self.act()
                protocol.release(ref)
            case ["create", [int(a), int(b)], [int(c), int(d)]]:
                if protocol.arrived((a, b), (c, d), _HOSTILE):
                    protocol.finished((a, b))
            case ["created", [int(a), int(b)], [int(c), int(d)]]:
                protocol.created(_HOSTILE, (a, b), (c, d))
            case ["fetch", [int(a), int(b)]]:
                protocol.release(protocol.expect((a, b)))
            case ["sweep"]:
                protocol.sweep()
        self.act()

    def act(self) -> None:
        """Do what the protocols ask for, until they ask for no more."""
        busy = True
        while busy:
            busy = False
            for me, protocol in self.protocols.items():
                for action in protocol.take_actions():
                    busy = True
                    match action:
                        case Send(peer, message) if peer in self.protocols and not self.apart:
                            packed([message])
                            self.protocols[peer].receive(me, message)
                        case Free(rref):
                            if rref in self.freed and rref[0] != _HOSTILE:  # who may use its own ids again
                                raise Broken(f"object {rref} is freed twice")
                            self.freed.add(rref)
                            self._check_free(me, rref)
                        case Fence(peer, reason):
                            self._fence(me, peer, reason)

    def _fence(self, me: Peer, peer: Peer, reason: str) -> None:
        self.protocols[me].peer_lost(peer, reason)
        if peer in self.protocols and not self.apart:
            self.apart = True
            self.protocols[peer].peer_lost(me, "it has cut this worker off")

    def _check_free(self, me: Peer, rref: tuple[int, int]) -> None:
        if not self.ending and (me, rref) in self.owned:
            raise Broken(f"object {rref} is freed, which its owner holds itself")

    def end(self) -> None:
        """The third one is lost; the others let go of everything: nothing is left, and nothing was taken."""
        if not self.apart:
            for owner, rref in self.owned:
                holder = 3 - owner
                for who, ref in self.held:
                    if (
                        who == holder
                        and ref[0] == owner
                        and self.protocols[who].state(ref) is not State.CONFIRMED
                    ):
                        raise Broken(
                            f"worker {who} has lost its reference {ref} to what worker {owner} holds: {rref}"
                        )
        for protocol in self.protocols.values():
            protocol.peer_lost(_HOSTILE, "over")
        self.act()
        self.ending = True
        for holder, ref in self.held + self.owned:
            self.protocols[holder].release(ref)
        self.act()
        for _ in range(2):
            for protocol in self.protocols.values():
                protocol.sweep()
            self.act()
        for me, protocol in self.protocols.items():
            if left := {kind: count for kind, count in protocol.counts().items() if count}:
                raise Broken(f"worker {me} is left with {left}")
        for _, rref in self.owned:
            if rref not in self.freed:
                raise Broken(f"object {rref} is never freed")


def run_references(data: bytes) -> None:
    """Steps of a member who says anything about references: forged evictions, false fences, others' forks."""
    world = References()
    refused = None
    for each in unpacked(data):
        match each:
            case [1 | 2 as to, list(step)] if type(to) is int:
                try:
                    world.say(to, step)
                except ProtocolError as error:  # he is cut off
                    refused = error
                    world.act()
                    world.protocols[to].peer_lost(_HOSTILE, str(error))
                    world.act()
    world.end()
    if refused is not None:
        raise refused


def seed_references() -> list[bytes]:
    ids = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 3], [9, 1], [9, 2], [9, 3], [5, 5]]
    says: list[list[Any]] = []
    for to in (1, 2):
        for first, second in ((0, 2), (4, 5), (6, 7), (6, 2), (0, 7), (9, 8)):
            rref, fork = ids[first], ids[second]
            says.append(
                [
                    [to, ["message", [kind, *args]]]
                    for kind, args in (
                        ("confirm", [rref, fork]),
                        ("delete", [rref, fork]),
                        ("abandon", [rref, "why"]),
                        ("confirmed", [fork]),
                        ("refused", [fork, "why"]),
                        ("accepted", [fork]),
                    )
                ]
            )
        says.append(
            [
                [to, ["message", [kind, peer]]]
                for kind in ("bereaved", "fenced", "cleared")
                for peer in (1, 2, 5, 9)
            ]
        )
        says += [[[to, ["message", ["fence", peer, "dead"]]], [to, ["sweep"]]] for peer in (1, 2, 5, 9)]
        says.append([[to, ["adopt", [1, [1, 1], [9, 7]]]], [to, ["adopt", [2, [2, 1], [9, 8]]]]])
        says.append([[to, ["adopt", [9, [9, 1], [9, 9]]]], [to, ["message", ["confirmed", [9, 9]]]]])
        says.append(
            [[to, ["create", [9, 1], [9, 2]]], [to, ["message", ["delete", [9, 1], [9, 2]]]], [to, ["sweep"]]]
        )
        says.append(
            [[to, ["message", ["abandon", [9, 1], "why"]]], [to, ["create", [9, 1], [9, 2]]], [to, ["sweep"]]]
        )
        says.append([[to, ["created", [to, 4], [to, 5]]], [to, ["fetch", [9, 4]]]])
    return [packed(each) for each in says]


TARGETS: Final = (
    Target("frames", run_frames, (ProtocolError,), seed_frames),
    Target("header", run_header, (ProtocolError,), seed_headers),
    Target("segment", run_segment, (ProtocolError,), seed_segments),
    Target("neutral", run_neutral, (RpcError,), seed_neutral, of_values=True),
    Target("value", run_value, (Malformed,), seed_values),
    Target("handshake", run_handshake, (ProtocolError,), seed_handshakes, of_values=True),
    Target("session", run_session, (ProtocolError,), seed_sessions, of_values=True),
    Target("references", run_references, (ProtocolError,), seed_references, of_values=True),
)

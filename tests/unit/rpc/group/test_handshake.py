"""The handshake: nothing but what the table allows; with an authenticator, only who has the token."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import ProtocolError
from rpc.group.admission import judge
from rpc.group.handshake import (
    TRANSITIONS,
    Handshake,
    HandshakeMessage,
    HandshakeState,
    Hello,
    Refusal,
    Stream,
    Welcomed,
)
from rpc.group.membership import Membership
from rpc.group.workers import Member
from rpc.transport.authentication import Role, Seal, TokenAuthenticator
from rpc.wire.frames import Kind
from tests.support.effort import PROFILE
from tests.support.members import member

ME, OTHER = member("me", 0, 500), member("other", 1, 400)
HELLO = Hello(OTHER, ME.incarnation, "job/1")


def sides(
    dialler: TokenAuthenticator | None, acceptor: TokenAuthenticator | None
) -> tuple[Handshake, Handshake]:
    return Handshake(Role.DIALLER, dialler), Handshake(Role.ACCEPTOR, acceptor)


def converse(dialler: Handshake, acceptor: Handshake, *, change: int = 0) -> tuple[list[int], Any]:
    """Let the two speak; the acceptor lets in whom its machine lets it judge.

    Args:
        change: the kind of a message that is changed on its way.

    Returns:
        The kinds of what they said, and what the dialler learns in the end.
    """
    said: list[int] = []
    message, receiver, other = dialler.greet(HELLO), acceptor, dialler
    while True:
        said.append(message.kind)
        header = msgpack.unpackb(msgpack.packb(message.header))
        if message.kind == change:
            header["more"] = 1
        match receiver.receive(message.kind, header):
            case HandshakeMessage() as message:
                pass
            case Hello():
                message = receiver.welcome()
            case Refusal() as refusal if receiver is acceptor:
                message = receiver.refuse(refusal)
            case outcome:
                return said, outcome
        receiver, other = other, receiver


# ---- the order of messages


def test_without_an_authenticator_welcome_follows_hello() -> None:
    dialler, acceptor = sides(None, None)
    assert converse(dialler, acceptor) == ([Kind.HELLO, Kind.WELCOME], Welcomed())
    assert dialler.state is acceptor.state is HandshakeState.WELCOMED


def test_with_an_authenticator_both_sides_prove_that_they_belong_to_the_job() -> None:
    dialler, acceptor = sides(TokenAuthenticator(b"token"), TokenAuthenticator(b"token"))
    assert converse(dialler, acceptor) == ([Kind.HELLO, Kind.CHALLENGE, Kind.PROOF, Kind.WELCOME], Welcomed())
    assert dialler.state is acceptor.state is HandshakeState.WELCOMED


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("state", HandshakeState)
def test_whatever_is_not_in_the_table_or_the_receivers_own_to_say_is_refused(
    role: Role, state: HandshakeState
) -> None:
    for kind in range(256):
        side = Handshake(role, TokenAuthenticator(b"token"))
        side.state = state
        by_dialler = kind in (Kind.HELLO, Kind.STREAM, Kind.PROOF)
        if kind in TRANSITIONS[state] and by_dialler == (role is Role.ACCEPTOR):
            with contextlib.suppress(Exception):  # for its content
                side.receive(kind, {})
            assert side.state is not state
        else:
            with pytest.raises(ProtocolError, match=f"expected .*, got a frame of kind {kind}"):
                side.receive(kind, {})
            assert side.state is state


# ---- proofs


def test_a_dialler_with_another_token_is_refused_before_it_is_told_anything() -> None:
    said, outcome = converse(*sides(TokenAuthenticator(b"guess"), TokenAuthenticator(b"token")))
    assert said == [Kind.HELLO, Kind.CHALLENGE, Kind.PROOF, Kind.REFUSED]
    assert outcome == Refusal("stranger", "it does not belong to this job: its proof is wrong")


@pytest.mark.parametrize(
    ("dialler", "acceptor", "complaint"),
    [
        (TokenAuthenticator(b"token"), None, "has not proven"),
        (None, TokenAuthenticator(b"token"), "wants a proof"),
    ],
    ids=["the acceptor has none", "the dialler has none"],
)
def test_an_authenticator_on_one_side_only_ends_the_connection(
    dialler: TokenAuthenticator | None, acceptor: TokenAuthenticator | None, complaint: str
) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        converse(*sides(dialler, acceptor))


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.CHALLENGE])
def test_a_proof_is_over_all_that_was_said_before(kind: int) -> None:
    _, outcome = converse(*sides(TokenAuthenticator(b"token"), TokenAuthenticator(b"token")), change=kind)
    assert isinstance(outcome, Refusal)


def test_the_acceptors_proof_is_over_the_diallers() -> None:
    with pytest.raises(ProtocolError, match="has not proven"):
        converse(*sides(TokenAuthenticator(b"token"), TokenAuthenticator(b"token")), change=Kind.PROOF)


# ---- on the wire

names = st.from_regex("[A-Za-z0-9_:-]{1,127}", fullmatch=True)
members = st.builds(
    lambda name, worker_id, incarnation, addresses: member(name, worker_id, incarnation, *addresses),
    names,
    st.integers(0, 2**31),
    st.integers(0, 2**63 - 1),
    st.lists(st.text(max_size=20), max_size=3),
)


def over_the_wire(header: dict[str, Any]) -> Any:
    return msgpack.unpackb(msgpack.packb(header))


def test_device_maps_arrive_as_they_were_said() -> None:
    maps = (("worker1", (("cuda:0", "cuda:1"), ("cpu", "cpu"))),)
    mapped = replace(OTHER, device_maps=maps, devices=("cuda", 2, ("cuda:0",)))
    arrived = Hello.parse(over_the_wire(Hello(mapped, 1, "job/1").header())).member
    assert arrived == mapped
    cuda = [torch.device("cuda", number) for number in range(2)]
    cpu = torch.device("cpu")
    assert (arrived.maps_for("worker1"), arrived.maps_for("worker2")) == ({cuda[0]: cuda[1], cpu: cpu}, {})


def test_a_device_that_pytorch_does_not_know_here_is_named_with_its_map() -> None:
    said = Hello(replace(OTHER, device_maps=(("worker1", (("npu:0", "cpu"),)),)), 1, "job/1").header()
    text = r"of worker 'other' for 'worker1' names the device 'npu:0'.*import"
    with pytest.raises(ProtocolError, match=text):
        Hello.parse(over_the_wire(said))


@PROFILE
@given(members, st.integers(0, 2**63 - 1), st.text(max_size=20))
def test_a_hello_arrives_as_it_was_said(who: Member, wanted: int, group: str) -> None:
    hello = Hello(who, wanted, group)
    assert Hello.parse(over_the_wire(hello.header())) == hello


FIELDS = ME.to_wire()


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"member": FIELDS, "group": "g"},
        {"member": FIELDS, "wanted": "1", "group": "g"},
        {"member": FIELDS, "wanted": 1, "group": b"g"},
        {"member": FIELDS[:-1], "wanted": 1, "group": "g"},
        {"member": ["no such/name", *FIELDS[1:]], "wanted": 1, "group": "g"},
        {"member": ["n" * 128, *FIELDS[1:]], "wanted": 1, "group": "g"},
        *(
            {"member": [*FIELDS[:index], wrong, *FIELDS[index + 1 :]], "wanted": 1, "group": "g"}
            for index, wrong in enumerate([1, "1", "1", 1, [1], 1])
        ),
        {"member": [*FIELDS[:4], 7, FIELDS[5]], "wanted": 1, "group": "g"},
        *(
            {"member": [*FIELDS, *devices], "wanted": 1, "group": "g"}
            for devices in (
                [[], "cuda"],
                [[], ["cuda", "two", []]],
                [[["a", [["no device", "cpu"]]]], None],
                [1, 2, 3],
            )
        ),
    ],
)
def test_a_malformed_hello_is_refused(header: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="a malformed hello"):
        Hello.parse(header)


# ---- proofs that are passed on


A, B = member("a", 0, 500), member("b", 1, 400)
TOKEN = TokenAuthenticator(b"the token of the job")


def dialler() -> Handshake:
    return Handshake(Role.DIALLER, TOKEN)


def acceptor() -> Handshake:
    return Handshake(Role.ACCEPTOR, TOKEN)


def answer(side: Handshake, message: HandshakeMessage) -> Any:
    return side.receive(message.kind, message.header)


def test_a_proof_is_good_for_one_connection() -> None:
    one, other = dialler(), acceptor()
    hello = one.greet(Hello(A, B.incarnation, "group"))
    proof = answer(one, answer(other, hello))
    assert isinstance(answer(other, proof), Hello)
    again = acceptor()
    assert answer(again, hello).kind == Kind.CHALLENGE
    assert isinstance(answer(again, proof), Refusal)


def test_a_welcome_is_good_for_one_connection() -> None:
    recorded: list[HandshakeMessage] = []
    for _ in range(2):
        one, other = dialler(), acceptor()
        challenge = answer(other, one.greet(Hello(A, B.incarnation, "group")))
        answer(other, answer(one, challenge))
        recorded += [challenge, other.welcome()]
    challenge, welcome, _, _ = recorded
    victim = dialler()
    victim.greet(Hello(A, B.incarnation, "group"))
    assert answer(victim, challenge).kind == Kind.PROOF
    with pytest.raises(ProtocolError, match="has not proven"):
        answer(victim, welcome)


def test_a_proof_for_another_worker_is_not_taken() -> None:
    """An impostor forwards the proof that a worker has sent it to a third worker, with a hello of its own."""
    one, other = dialler(), acceptor()
    one.greet(Hello(A, 666, "group"))
    challenge = answer(other, dialler().greet(Hello(A, B.incarnation, "group")))
    assert isinstance(answer(other, answer(one, challenge)), Refusal)


def test_a_worker_that_is_led_to_prove_itself_to_itself_does_not_let_itself_in() -> None:
    """A stranger passes on all that the worker says as dialler to the same worker as acceptor."""
    as_dialler, as_acceptor = dialler(), acceptor()
    challenge = answer(as_acceptor, as_dialler.greet(Hello(A, 666, "group")))
    hello = answer(as_acceptor, answer(as_dialler, challenge))
    assert isinstance(hello, Hello)
    refusal = judge(hello, Membership(A, static=False), "group", connected=False, connecting=False)
    assert refusal is not None
    assert f"{A.incarnation:x}" not in refusal.reason


# ---- records


def test_without_a_token_records_are_as_they_are() -> None:
    assert Seal().close("name", b"value") == b"value"
    assert Seal().open("name", b"value") == b"value"


@pytest.mark.parametrize("proof", [{}, {"mac": b""}, {"nonce": b"", "mac": ""}, {"nonce": 1, "mac": b"x"}])
def test_a_malformed_proof_is_a_wrong_one(proof: dict[str, Any]) -> None:
    assert not TOKEN.verify(Role.DIALLER, b"said", proof)


def test_the_first_message_of_a_stream_is_returned_once_its_side_has_proven_itself() -> None:
    one, other = dialler(), acceptor()
    stream = Stream(b"the streams' token", 3)
    assert answer(other, answer(one, answer(other, one.greet(stream)))) == stream
    assert answer(one, other.welcome()) == Welcomed()

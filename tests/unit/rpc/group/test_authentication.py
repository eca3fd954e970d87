"""Authentication: a process with the token belongs to the job; one that knows everything else does not."""

from __future__ import annotations

from typing import Any

import pytest

from rpc.errors import ProtocolError
from rpc.group.admission import judge
from rpc.group.handshake import Handshake, HandshakeMessage, Hello, Refusal, Stream, Welcomed
from rpc.group.membership import Membership
from rpc.transport.authentication import Role, Seal, TokenAuthenticator
from rpc.wire.frames import Kind
from tests.support.members import member

A, B = member("a", 0, 500), member("b", 1, 400)
TOKEN = TokenAuthenticator(b"the token of the job")


def dialler() -> Handshake:
    return Handshake(Role.DIALLER, TOKEN)


def acceptor() -> Handshake:
    return Handshake(Role.ACCEPTOR, TOKEN)


def answer(side: Handshake, message: HandshakeMessage) -> Any:
    return side.receive(message.kind, message.header)


def test_the_first_message_of_a_stream_is_returned_once_its_side_has_proven_itself() -> None:
    one, other = dialler(), acceptor()
    stream = Stream(b"the streams' token", 3)
    assert answer(other, answer(one, answer(other, one.greet(stream)))) == stream
    assert answer(one, other.welcome()) == Welcomed()


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
    """Whoever a worker connects to passes its proof on to a third one, under another hello."""
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


@pytest.mark.parametrize("proof", [{}, {"mac": b""}, {"nonce": b"", "mac": ""}, {"nonce": 1, "mac": b"x"}])
def test_a_malformed_proof_is_a_wrong_one(proof: dict[str, Any]) -> None:
    assert not TOKEN.verify(Role.DIALLER, b"said", proof)


# ---- records


def test_without_a_token_records_are_as_they_are() -> None:
    assert Seal().close("name", b"value") == b"value"
    assert Seal().open("name", b"value") == b"value"

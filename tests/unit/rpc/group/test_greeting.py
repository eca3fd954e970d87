"""Handshakes over connections: both sides and the log have the reason, and the listener stays."""

from __future__ import annotations

import random
import re
import socket
import struct
import threading
from collections.abc import Callable

import pytest

from rpc.group import connections, greeting
from rpc.group.workers import Member
from rpc.transport.authentication import TokenAuthenticator
from rpc.wire.frames import MAGIC, PREAMBLE, PROTOCOL_VERSION, Kind
from tests.support.members import member
from tests.support.nodes import MakeNode, Node, pair, refusals
from tests.support.stranger import Stranger, frame, hello_to
from tests.support.streams import SOON, until

# ---- who comes in


def test_a_hello_that_comes_before_the_group_is_formed_is_answered_then(make_node: MakeNode) -> None:
    early, late = make_node("early"), make_node("late")
    early.form_group(late.member)
    early.send(late, 1)
    until(lambda: late.connections.handshaking)
    late.form_group(early.member)
    late.wait_until(lambda: late.numbers_from(early) == [1])


def test_a_stranger_learns_neither_incarnation_nor_group(
    make_node: MakeNode, stranger: Callable[[Node], Stranger]
) -> None:
    node, friend = (
        make_node(name, authenticator=TokenAuthenticator(b"token")) for name in ("node", "friend")
    )
    node.form_group(friend.member)
    visitor = stranger(node)
    visitor.say_hello(hello_to(node, friend.member, wanted=1, group="whose?"))
    (challenge,) = visitor.hear(1)
    assert (challenge.kind, [*challenge.header]) == (Kind.CHALLENGE, ["nonce"])
    visitor.say(frame(Kind.PROOF, {"nonce": b"x" * 32, "mac": b"x" * 32}))
    (refused,) = visitor.hear()
    assert refused.kind == Kind.REFUSED
    assert refused.header == {
        "code": "stranger",
        "reason": "it does not belong to this job: its proof is wrong",
    }


def test_of_many_strangers_the_slowest_are_cut_off_and_members_come_in(
    make_node: MakeNode, stranger: Callable[[Node], Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_STRANGERS", 20)
    monkeypatch.setattr(connections, "SLOW_SECONDS", 0.0)
    node, other = pair(make_node, host="host")
    first = [stranger(node) for _ in range(20)]
    until(lambda: node.connections.handshaking == 20)
    second = [stranger(node) for _ in range(20)]
    assert all(each.is_cut_off() for each in first)
    assert node.connections.handshaking <= 20
    other.send(node, 1)
    node.wait_until(lambda: node.numbers_from(other) == [1])
    for each in second:
        each.close()


def test_a_handshake_may_take_longer_if_it_was_this_worker_that_stood_still(
    make_node: MakeNode, stranger: Callable[[Node], Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, other = (make_node(name, authenticator=TokenAuthenticator(b"token")) for name in ("node", "other"))
    node.form_group(other.member)
    other.form_group(node.member)
    monkeypatch.setattr(greeting, "SLOW_SECONDS", 0.1)
    node.connections.stranger_seconds = 0.2
    resume, stopped = threading.Event(), threading.Event()

    def stand_still() -> None:
        if not node.connections.handshaking:
            node.loop.call_soon(stand_still)
            return
        stopped.set()
        resume.wait(SOON)

    node.loop.call_soon_threadsafe(stand_still)
    visitor = stranger(node)
    assert stopped.wait(SOON)
    visitor.say_hello(hello_to(node))
    threading.Timer(0.5, resume.set).start()
    assert visitor.hear(1)[0].kind == Kind.CHALLENGE


def test_refusals_do_not_fill_the_log(
    make_node: MakeNode, stranger: Callable[[Node], Stranger], caplog: pytest.LogCaptureFixture
) -> None:
    node, other = pair(make_node, host="host")
    for _ in range(60):
        visitor = stranger(node)
        visitor.say(b"nonsense")
        assert visitor.is_cut_off()
    other.send(node, 1)
    node.wait_until(lambda: node.numbers_from(other) == [1])
    assert 20 <= len(refusals(caplog)) <= 25


PREFIX = struct.Struct("<QQIIB3x")
"""Of a frame: body length, call id, header length, buffer count, kind."""

NONSENSE: dict[str, tuple[bytes, str]] = {
    "an HTTP request": (
        b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
        r"does not speak farcall's protocol \(it began with b'GET / HT'\)",
    ),
    "half a preamble": (PREAMBLE[:4], "no handshake within 0.3 s"),
    "a frame too long for a hello": (
        PREAMBLE + PREFIX.pack(1 << 20, 0, 1 << 20, 0, Kind.HELLO),
        f"a frame of {1 << 20} bytes is over the limit of 65536",
    ),
    "a name that cannot be": (
        PREAMBLE
        + frame(
            Kind.HELLO, {"member": ["\x1b[31m\n", 1, 1, "", [], "", 1 << 30, False], "wanted": 1, "group": ""}
        ),
        r"a malformed hello: InvalidNameError.*\\x1b\[31m\\n",
    ),
    "random bytes": (
        PREAMBLE + random.Random(1).randbytes(5000),
        "a frame of [0-9]+ bytes is over the limit",
    ),
}
"""What a stranger says, and what the log says of it."""


@pytest.mark.parametrize(("said", "complaint"), NONSENSE.values(), ids=NONSENSE)
def test_what_is_no_hello_is_cut_off_and_logged_and_the_listener_lives_on(
    make_node: MakeNode,
    stranger: Callable[[Node], Stranger],
    caplog: pytest.LogCaptureFixture,
    said: bytes,
    complaint: str,
) -> None:
    node, other = pair(make_node)
    if "no handshake" in complaint:
        node.connections.stranger_seconds = 0.3
    visitor = stranger(node)
    visitor.say(said)
    assert visitor.is_cut_off()
    until(lambda: refusals(caplog))
    (logged,) = refusals(caplog)
    host, port = visitor.socket.getsockname()
    assert re.match(f"refused {host}:{port}: .*{complaint}", logged)
    assert len(logged) < 500
    other.send(node, 1)
    node.wait_until(lambda: node.numbers_from(other) == [1])


# ---- who is refused elsewhere


def test_a_worker_that_refuses_us_is_gone_and_says_why(make_node: MakeNode) -> None:
    node, other = make_node("node"), make_node("other")
    replaced = Member(other.member.info, 666, "host", other.member.addresses)
    node.form_group(replaced)  # what now listens there is another incarnation
    other.form_group(node.member)
    node.peers[666].send_small(b"whatever", False)
    name, reason = node.wait_gone()
    assert name == "other"
    assert reason.startswith("it refused the connection: worker 'node' asked worker 'other'")
    assert "wanted incarnation 29a, which is no longer at this address" in reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "the peer does not speak farcall's protocol"),
        (
            MAGIC + b"\x09",
            f"the peer speaks version 9 of farcall's protocol, this worker version {PROTOCOL_VERSION}",
        ),
        (PREAMBLE + frame(Kind.REPLY, {}), "expected challenge or welcome or refused, got a frame of kind 6"),
        (PREAMBLE + frame(Kind.REFUSED, {"reason": "no\nlines"}), "it refused the connection: 'no\\nlines'"),
        (b"", "the connection was closed by the other side"),
    ],
    ids=["http", "version", "reply", "lines", "nothing"],
)
def test_what_answers_wrongly_at_a_workers_address_makes_it_gone(
    make_node: MakeNode, answer: bytes, reason: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SOON)
        node = make_node("node")
        node.form_group(member("other", 7, 777, f"tcp:127.0.0.1:{server.getsockname()[1]}"))
        node.peers[777].send_small(b"whatever", False)
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(answer)
            accepted.shutdown(socket.SHUT_WR)
            name, why = node.wait_gone()
    assert name == "other"
    assert reason in why
    assert why.isprintable()

"""Connections between workers: who comes in, who is turned away and told why, who is noticed to be gone."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rpc import links as module
from rpc.errors import WorkerLostError
from rpc.handshake import Hello, parse_refusal
from rpc.loop import LoopThread
from rpc.transport import Transport
from rpc.transport.tcp import TcpTransport
from rpc.wire import MAGIC, PREAMBLE, Decoder, Frame, Kind, encode
from rpc.workers import Member
from tests.rpc.members import member
from tests.rpc.memory_transport import MemoryNetwork, MemoryTransport
from tests.rpc.nodes import GROUP, MESSAGE, Node
from tests.rpc.streams import SOON, until


@pytest.fixture
def threads() -> Iterator[list[LoopThread]]:
    """Two loops, for two workers."""
    made = [LoopThread(f"test-loop{index}", "not on this thread") for index in range(2)]
    yield made
    assert all(thread.stop() for thread in made)


@pytest.fixture
def make(threads: list[LoopThread]) -> Iterator[Callable[..., Node]]:
    """Makes workers, by turns on either loop, which leave when the test is over."""
    made: list[Node] = []

    def make_one(name: str, incarnation: int | None = None, **options: Any) -> Node:
        thread = threads[len(made) % 2]
        made.append(Node.on(thread, name, len(made), incarnation or 100 + len(made), **options))
        made[-1].thread = thread  # type: ignore[attr-defined]
        return made[-1]

    yield make_one
    for node in made:
        leave(node)


def leave(node: Node, reason: str = "the test is over") -> None:
    thread: LoopThread = node.thread  # type: ignore[attr-defined]
    thread.wait_for(node.leave(reason), SOON)


def pair(make: Callable[..., Node], **options: Any) -> tuple[Node, Node]:
    """Two workers of one static group."""
    left, right = make("left", **options), make("right", **options)
    left.form_group(right.member)
    right.form_group(left.member)
    return left, right


class Stranger:
    """Whoever connects over TCP, and says what a test wants said."""

    def __init__(self, node: Node) -> None:
        _, host, port = node.member.addresses[-1].split(":")
        self.socket = socket.create_connection((host, int(port)), SOON)
        self._decoder = Decoder(1 << 20)

    def say(self, data: bytes) -> None:
        self.socket.sendall(data)

    def say_hello(self, hello: Hello) -> None:
        self.say(PREAMBLE + frame(Kind.HELLO, hello.header()))

    def hear(self, count: int = 1000) -> list[Frame]:
        """What the worker says, until there are so many frames or it closes."""
        frames: list[Frame] = []
        while len(frames) < count:
            received = self.socket.recv_into(self._decoder.buffer())
            if not received:
                break
            frames += self._decoder.received(received)
        return frames

    def is_cut_off(self) -> bool:
        with contextlib.suppress(ConnectionResetError):
            self.hear()
        return True

    def close(self) -> None:
        self.socket.close()


def frame(kind: int, header: dict[str, Any], *segments: bytes) -> bytes:
    return b"".join(encode(kind, 0, header, segments)[0])


@pytest.fixture
def stranger() -> Iterator[Callable[[Node], Stranger]]:
    """Makes strangers, who hang up when the test is over."""
    made: list[Stranger] = []

    def make_one(node: Node) -> Stranger:
        made.append(Stranger(node))
        return made[-1]

    yield make_one
    for each in made:
        each.close()


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged about those who were turned away."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.getMessage().startswith("refused")
    ]


# ---- connecting


@pytest.mark.parametrize(("host", "scheme"), [("host", "unix"), (None, "tcp")])
def test_a_message_brings_about_the_connection(
    make: Callable[..., Node], host: str | None, scheme: str
) -> None:
    left = make("left", host=host or "one host")
    right = make("right", host=host or "another host")
    left.form_group(right.member)
    right.form_group(left.member)
    assert left.open_connections() == []
    left.send(right, 1)
    right.wait_until(lambda: right.numbers_from(left) == [1])
    right.send(left, 2)
    left.wait_until(lambda: left.numbers_from(right) == [2])
    (connection,) = left.open_connections()
    family = socket.AF_UNIX if scheme == "unix" else socket.AF_INET
    assert connection._socket.family == family  # type: ignore[attr-defined]
    assert connection.description == "worker 'right'"  # type: ignore[attr-defined]


def test_messages_of_many_threads_sent_while_connecting_arrive_once_and_in_each_threads_order(
    make: Callable[..., Node],
) -> None:
    left, right = pair(make)
    start = threading.Barrier(4)

    def talk(first: int) -> None:
        start.wait(SOON)
        for number in range(first, first + 200):
            left.send(right, number)

    talking = [threading.Thread(target=talk, args=(1000 * index,)) for index in range(4)]
    for each in talking:
        each.start()
    for each in talking:
        each.join(SOON)
    right.wait_until(lambda: len(right.received) == 800)
    for first in range(0, 4000, 1000):
        mine = [number for number in right.numbers_from(left) if first <= number < first + 1000]
        assert mine == list(range(first, first + 200))


@pytest.mark.parametrize("host", ["host", None], ids=["unix", "tcp"])
def test_two_that_connect_to_each_other_at_once_get_one_connection_and_lose_nothing(
    make: Callable[..., Node], host: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(5)
    for _ in range(25):
        incarnations = chance.sample(range(1, 1000), 2)
        left = make("left", incarnations[0], host=host or "one host")
        right = make("right", incarnations[1], host=host or "another host")
        left.form_group(right.member)
        right.form_group(left.member)
        start = threading.Barrier(2)

        def talk(here: Node, there: Node, delay: int, start: threading.Barrier = start) -> None:
            start.wait(SOON)
            for _ in range(delay):
                pass
            for number in range(5):
                here.send(there, number)

        talking = [
            threading.Thread(target=talk, args=(here, there, chance.randrange(5000)))
            for here, there in ((left, right), (right, left))
        ]
        for each in talking:
            each.start()
        for here, there in ((left, right), (right, left)):
            here.wait_until(lambda here=here: len(here.received) == 5)  # type: ignore[misc]
            assert here.numbers_from(there) == list(range(5))
        for each in talking:
            each.join(SOON)
        for here in (left, right):
            until(lambda here=here: len(here.open_connections()) == 1)  # type: ignore[misc]
            assert here.gone == []
        leave(left)
        leave(right)
    assert refusals(caplog) == []


def test_a_worker_that_cannot_be_reached_is_gone_and_the_reason_says_where_it_was_looked_for(
    make: Callable[..., Node],
) -> None:
    left, right = pair(make)
    address = right.member.addresses[1]
    right.on_loop(right.links.stop_listening)
    left.send(right, 1)
    name, reason = left.wait_gone()
    assert name == "right"
    assert reason.startswith("it cannot be reached at unix:@farcall-")
    assert f"{address}: Connect" in reason
    with pytest.raises(WorkerLostError, match=r"worker 'right' .* it cannot be reached"):
        left.send(right, 2)


@pytest.mark.parametrize(
    "address", ["tcp:nowhere", "tcp::port", "tcp:127.0.0.1:99999999", "unix:@" + "x" * 200, "unix:@\udcff"]
)
def test_an_address_that_makes_no_sense_makes_a_worker_unreachable(
    make: Callable[..., Node], address: str
) -> None:
    left = make("left")
    there = member("elsewhere", 7, 777, address)
    left.form_group(there)
    left.peers[777].send_small(b"whatever", False)
    name, reason = left.wait_gone()
    assert name == "elsewhere"
    assert reason.startswith("it cannot be reached at ")


def test_a_worker_without_an_address_for_us_is_unreachable(make: Callable[..., Node]) -> None:
    left, right = make("left", host="one host"), make("right", host="another host")
    only_unix = Member(right.member.info, 55, "another host", right.member.addresses[:1])
    left.form_group(only_unix)
    left.peers[55].send_small(b"whatever", False)
    assert left.wait_gone() == ("right", "it cannot be reached at any address known here")


def test_a_worker_that_does_not_answer_is_given_up(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.05)
    network = MemoryNetwork()
    reach: dict[str, Transport] = {"memory": MemoryTransport(network)}
    left, right = pair(make, reach=reach)
    left.send(right, 1)
    assert left.wait_gone() == ("right", "it cannot be reached at memory:127.0.0.1: no answer within 0.05 s")


def test_listening_leaves_nothing_open_when_one_transport_fails(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make("node")

    def fail(*_: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(TcpTransport, "listen", fail)
    node.on_loop(node.links.stop_listening)
    with pytest.raises(OSError, match="Address already in use"):
        node.on_loop(node.links.listen, "127.0.0.1", 0)
    assert node.on_loop(node.links.connections, []) == []


# ---- who comes in


def test_a_newcomer_joins_a_dynamic_group_by_connecting(make: Callable[..., Node]) -> None:
    here, newcomer = make("here"), make("newcomer")
    here.form_group(static=False)
    newcomer.form_group(here.member, static=False)
    newcomer.send(here, 1)
    here.wait_until(lambda: here.numbers_from(newcomer) == [1])
    assert here.view.find(newcomer.member.incarnation) == newcomer.member
    here.send(newcomer, 2)
    newcomer.wait_until(lambda: newcomer.numbers_from(here) == [2])


def test_a_hello_that_comes_before_the_group_is_formed_is_answered_then(make: Callable[..., Node]) -> None:
    early, late = make("early"), make("late")
    early.form_group(late.member)
    early.send(late, 1)
    until(lambda: late.links._early)
    late.form_group(early.member)
    late.wait_until(lambda: late.numbers_from(early) == [1])


def hello_to(node: Node, who: Member | None = None, *, wanted: int = 0, group: str = GROUP) -> Hello:
    return Hello(who or member("stranger", 9, 900), wanted or node.member.incarnation, group)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "is not among the workers that formed the group"),
        ({"group": "another job"}, "in the name of another group"),
        ({"wanted": 12345}, "wanted incarnation 3039, which is no longer at this address"),
        ({"who": "gone"}, "which has given it up (it died)"),
        ({"who": "itself"}, "claims to be that very worker"),
    ],
)
def test_who_does_not_belong_here_is_told_why_naming_both_sides_and_it_is_logged(
    make: Callable[..., Node],
    stranger: Callable[[Node], Stranger],
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    said: str,
) -> None:
    node, other = pair(make)
    if options.get("who") == "gone":
        options = {"who": other.member}
        node.on_loop(node.links.lose, node.peers[other.member.incarnation], "it died")
    elif options.get("who") == "itself":
        options = {"who": node.member}
    caplog.clear()
    hello = hello_to(node, **options)
    visitor = stranger(node)
    visitor.say_hello(hello)
    (answer,) = visitor.hear()
    assert answer.kind == Kind.REFUSED
    reason = parse_refusal(answer.header).reason
    assert f"worker '{hello.member.name}' asked worker 'left' (id 0, incarnation 64)" in reason
    assert said in reason
    (logged,) = refusals(caplog)
    assert reason in logged


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (
            b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n",
            "does not speak farcall's protocol (it began with b'GET / HT')",
        ),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "does not speak farcall's protocol"),
        (MAGIC + b"\x09", "the peer speaks version 9 of farcall's protocol, this worker version 1"),
        (PREAMBLE + b"\xff" * 100, "over the limit of 65536"),
        (PREAMBLE + frame(Kind.HELLO, {"member": "me"}), "a malformed hello"),
        (PREAMBLE + frame(Kind.HELLO, {}, b"x" * 65537), "over the limit of 65536"),
        (PREAMBLE + frame(Kind.CALL, {}, b"a pickle"), "expected one hello, got a frame of kind 5"),
        (PREAMBLE + frame(Kind.WELCOME, {}), "expected one hello, got a frame of kind 2"),
        (PREAMBLE + frame(MESSAGE, {}), "expected one hello, got a frame of kind 32"),
    ],
    ids=["http", "tls", "version", "garbage", "bad hello", "huge hello", "call", "welcome", "extension"],
)
def test_what_is_no_hello_is_cut_off_and_logged_and_the_listener_lives_on(
    make: Callable[..., Node],
    stranger: Callable[[Node], Stranger],
    caplog: pytest.LogCaptureFixture,
    said: bytes,
    complaint: str,
) -> None:
    node, other = pair(make)
    visitor = stranger(node)
    visitor.say(said)
    assert visitor.is_cut_off()
    until(lambda: refusals(caplog))
    (logged,) = refusals(caplog)
    assert complaint in logged
    host, port = visitor.socket.getsockname()
    assert f"refused {host}:{port}: " in logged
    other.send(node, 1)
    node.wait_until(lambda: node.numbers_from(other) == [1])


def test_who_says_hello_twice_is_cut_off(
    make: Callable[..., Node], stranger: Callable[[Node], Stranger]
) -> None:
    node = make("node")  # its group is not formed yet, so it does not answer
    visitor = stranger(node)
    visitor.say_hello(hello_to(node))
    until(lambda: node.links._early)
    visitor.say(frame(Kind.HELLO, hello_to(node).header()))
    assert visitor.is_cut_off()
    node.form_group()  # answers nobody


def test_who_says_nothing_is_cut_off_in_time(
    make: Callable[..., Node],
    stranger: Callable[[Node], Stranger],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.05)
    caplog.set_level(logging.DEBUG)
    node, _ = pair(make)
    visitor = stranger(node)
    assert visitor.is_cut_off()
    until(lambda: "no handshake within 0.05 s" in caplog.text)


def test_who_only_looks_in_is_no_news(
    make: Callable[..., Node], stranger: Callable[[Node], Stranger], caplog: pytest.LogCaptureFixture
) -> None:
    node, _ = pair(make)
    visitor = stranger(node)
    until(lambda: node.links._handshakes)
    visitor.close()
    until(lambda: not node.links._handshakes)
    assert refusals(caplog) == []


def test_strangers_in_numbers_do_not_keep_members_out(
    make: Callable[..., Node], stranger: Callable[[Node], Stranger]
) -> None:
    node, other = pair(make, host="host")
    for index in range(30):
        stranger(node).say([b"", PREAMBLE, b"garbage", PREAMBLE + b"\0" * 20][index % 4])
    other.send(node, 1)
    node.wait_until(lambda: node.numbers_from(other) == [1])


# ---- who is refused elsewhere


def test_a_worker_that_refuses_us_is_gone_and_says_why(make: Callable[..., Node]) -> None:
    node, other = make("node"), make("other")
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
        (MAGIC + b"\x02", "the peer speaks version 2 of farcall's protocol, this worker version 1"),
        (PREAMBLE + frame(Kind.REPLY, {}), "expected welcome or refused, got a frame of kind 6"),
        (PREAMBLE + frame(Kind.REFUSED, {"reason": "no\nlines"}), "it refused the connection: 'no\\nlines'"),
        (PREAMBLE + frame(Kind.REFUSED, {}), "it refused the connection: no reason given"),
        (b"", "the connection was closed by the other side"),
    ],
    ids=["http", "version", "reply", "lines", "no reason", "nothing"],
)
def test_what_answers_wrongly_at_a_workers_address_makes_it_gone(
    make: Callable[..., Node], answer: bytes, reason: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SOON)
        node = make("node")
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


# ---- leaving


def test_who_leaves_says_so_after_everything_else(
    make: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    left, right = pair(make)
    left.send(right, 0)
    right.wait_until(lambda: right.received)
    for number in range(1, 100):
        left.send(right, number)
    leave(left, "it has done its work")
    assert right.wait_gone() == ("left", "it has done its work")
    assert right.numbers_from(left) == list(range(100))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    with pytest.raises(WorkerLostError, match=r"worker 'left' \(id 0\) is gone: it has done its work"):
        right.send(left, 1)


def test_who_dies_is_noticed(make: Callable[..., Node]) -> None:
    left, right = pair(make)
    left.send(right, 1)
    right.wait_until(lambda: right.received)
    (connection,) = left.open_connections()
    left.on_loop(connection.close, "dead")  # type: ignore[attr-defined]
    name, reason = right.wait_gone()
    assert name == "left"
    assert reason == (
        "the connection was closed by the other side without a goodbye; its process has died, most likely"
    )
    assert len(right.gone) == 1


def test_who_is_lost_gets_no_more_messages_and_the_connection_is_closed(make: Callable[..., Node]) -> None:
    left, right = pair(make)
    left.send(right, 1)
    right.wait_until(lambda: right.received)
    right.on_loop(right.links.lose, right.peers[left.member.incarnation], "it was given up")
    right.on_loop(right.links.lose, right.peers[left.member.incarnation], "twice")
    assert right.gone == [("left", "it was given up")]
    assert right.open_connections() == []
    assert left.wait_gone()[0] == "right"


def test_leaving_waits_for_nobody_for_ever(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, threads: list[LoopThread]
) -> None:
    monkeypatch.setattr(module, "FAREWELL_SECONDS", 0.05)
    left, right = pair(make)
    left.send(right, 1)
    right.wait_until(lambda: right.received)
    stuck, go_on = threading.Event(), threading.Event()

    def stick() -> None:
        stuck.set()
        go_on.wait(SOON)

    threads[1].loop.call_soon_threadsafe(stick)
    assert stuck.wait(SOON)
    left.peers[right.member.incarnation].send([bytes(8_000_000)], 8_000_000, wait=False)
    leave(left)
    go_on.set()


def test_leaving_while_connecting_says_nothing_wrong(
    make: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    left, right = make("left"), make("right")
    left.form_group(right.member)
    left.send(right, 1)
    until(lambda: right.links._early)
    leave(right)
    leave(left)
    assert all("shutting down" not in record.getMessage() for record in caplog.records)


# ---- fork


def test_a_forked_child_can_let_go_of_everything_that_is_open(
    make: Callable[..., Node], stranger: Callable[[Node], Stranger]
) -> None:
    left, right = pair(make)
    left.send(right, 1)
    right.wait_until(lambda: right.received)
    visitor = stranger(right)
    until(lambda: right.links._handshakes)
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        everything = right.links.connections(right.peers.values())
        for each in everything:
            each.abandon()
        os.write(tell, bytes([len(everything)]))
        os._exit(0)
    assert os.read(told, 1) == bytes([4])  # two listeners, a member, a visitor
    os.waitpid(child, 0)
    os.close(told)
    os.close(tell)
    left.send(right, 2)
    right.wait_until(lambda: right.numbers_from(left) == [1, 2])
    visitor.say_hello(hello_to(right))
    assert visitor.hear(1)[0].kind == Kind.REFUSED

"""Connections between workers: who comes in, who is turned away and told why, who is noticed to be gone."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from rpc.errors import WorkerLostError
from rpc.group.connections import CRASHED
from rpc.group.peer import Peer
from rpc.group.workers import Member
from rpc.testing.memory_transport import MemoryNetwork, MemoryTransport
from rpc.transport.base import Connection, ConnectionClosed, QueueFull, Transport
from rpc.transport.tcp import TcpTransport
from rpc.wire.frames import Kind
from tests.support.members import codec, member
from tests.support.nodes import MakeNode, Node, pair
from tests.support.stranger import Stranger, hello_to
from tests.support.streams import SOON, until

# ---- connecting


def test_messages_of_many_threads_sent_while_connecting_arrive_once_and_in_each_threads_order(
    make_node: MakeNode,
) -> None:
    left, right = pair(make_node)
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


def test_a_worker_that_cannot_be_reached_is_gone_and_the_reason_says_where_it_was_looked_for(
    make_node: MakeNode,
) -> None:
    left, right = pair(make_node)
    address = right.member.addresses[1]
    right.on_loop(right.connections.stop_listening)
    left.send(right, 1)
    name, reason = left.wait_gone()
    assert name == "right"
    assert reason.startswith("it cannot be reached at its socket on this host: Connection refused; tcp:")
    assert f"{address}: Connect" in reason
    assert reason.endswith("(did its program end without rpc.shutdown()?)")
    with pytest.raises(WorkerLostError, match=r"worker 'right' .* it cannot be reached"):
        left.send(right, 2)


class FullDisk(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("no space left")


def test_a_worker_whose_loss_cannot_be_logged_is_gone_all_the_same(make_node: MakeNode) -> None:
    left, right = pair(make_node)
    left.send(right, 1)
    right.wait_until(lambda: right.received)
    log, handler = logging.getLogger("rpc.group.connections"), FullDisk()
    log.addHandler(handler)
    try:
        with pytest.raises(OSError, match="no space"):
            left.on_loop(left.connections.lose, left.peers[right.member.incarnation], "it said\na lot")
    finally:
        log.removeHandler(handler)
    assert left.gone == [("right", repr("it said\na lot"))]
    until(lambda: left.open_connections() == [])  # the other side may ask once more
    with pytest.raises(WorkerLostError):
        left.send(right, 2)


@pytest.mark.parametrize(
    "address", ["tcp:nowhere", "tcp::port", "tcp:127.0.0.1:99999999", "unix:@" + "x" * 200, "unix:@\udcff"]
)
def test_an_address_that_makes_no_sense_makes_a_worker_unreachable(make_node: MakeNode, address: str) -> None:
    left = make_node("left")
    there = member("elsewhere", 7, 777, address)
    left.form_group(there)
    left.peers[777].send_small(b"whatever", False)
    name, reason = left.wait_gone()
    assert name == "elsewhere"
    assert reason.startswith("it cannot be reached at ")


def test_a_worker_without_an_address_for_us_is_unreachable(make_node: MakeNode) -> None:
    left, right = make_node("left", host="one host"), make_node("right", host="another host")
    only_unix = Member(right.member.info, 55, "another host", right.member.addresses[:1])
    left.form_group(only_unix)
    left.peers[55].send_small(b"whatever", False)
    assert left.wait_gone() == ("right", "it cannot be reached at any address known here")


def test_a_worker_that_does_not_answer_is_given_up(
    make_node: MakeNode,
) -> None:
    network = MemoryNetwork()
    reach: dict[str, Transport] = {"memory": MemoryTransport(network)}
    left, right = make_node("left", reach=reach), make_node("right", reach=reach)
    left.connections.connect_seconds = 0.05
    left.form_group(right.member)
    left.send(right, 1)
    assert left.wait_gone() == ("right", "it cannot be reached at memory:127.0.0.1: no answer within 0.05 s")


def test_listening_leaves_nothing_open_when_one_transport_fails(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node("node")

    def fail(*_: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(TcpTransport, "listen", fail)
    node.on_loop(node.connections.stop_listening)
    with pytest.raises(OSError, match="Address already in use"):
        node.on_loop(node.connections.listen, "127.0.0.1", 0)
    assert node.on_loop(node.connections.connections, []) == []


# ---- leaving


def test_who_leaves_says_so_after_everything_else(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    left, right = pair(make_node)
    left.send(right, 0)
    right.wait_until(lambda: right.received)
    for number in range(1, 100):
        left.send(right, number)
    left.leave("it has done its work")
    assert right.wait_gone() == ("left", "it has done its work")
    assert right.numbers_from(left) == list(range(100))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    with pytest.raises(WorkerLostError, match=r"worker 'left' \(id 0\) is gone: it has done its work"):
        right.send(left, 1)


@contextlib.contextmanager
def stuck(node: Node) -> Iterator[None]:
    """A worker's loop does nothing meanwhile."""
    begun, go_on = threading.Event(), threading.Event()

    def stick() -> None:
        begun.set()
        go_on.wait()

    node.loop.call_soon_threadsafe(stick)
    assert begun.wait(SOON)
    try:
        yield
    finally:
        go_on.set()


def is_closed(connection: Connection) -> bool:
    try:
        connection.send_small(b"too late?", 0)
    except ConnectionClosed:
        return True
    return False


def test_leaving_that_is_cancelled_closes_what_its_peers_do_not_read(
    make_node: MakeNode,
) -> None:
    left, right = pair(make_node)
    left.connections.farewell_seconds = 1000.0
    left.send(right, 1)
    right.wait_until(lambda: right.received)
    with stuck(right):
        left.peers[right.member.incarnation].send([bytes(8_000_000)], 8_000_000, wait=False)
        (connection,) = left.open_connections()
        assert left.thread is not None
        with pytest.raises(TimeoutError):
            left.thread.wait_for(left.connections.close(list(left.peers.values()), "it ends"), timeout=0.05)
        until(lambda: is_closed(connection))


def test_leaving_while_connecting_says_nothing_wrong(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    left, right = make_node("left"), make_node("right")
    left.form_group(right.member)
    left.send(right, 1)
    until(lambda: right.connections.handshaking)
    right.leave()
    left.leave()
    assert all("shutting down" not in record.getMessage() for record in caplog.records)


# ---- fork


def test_a_forked_child_can_let_go_of_everything_that_is_open(
    make_node: MakeNode, stranger: Callable[[Node], Stranger]
) -> None:
    left, right = pair(make_node)
    left.send(right, 1)
    right.wait_until(lambda: right.received)
    visitor = stranger(right)
    until(lambda: right.connections.handshaking)
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        everything = right.connections.connections(right.peers.values())
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


# ---- before there is a connection


def unconnected(to: Member, **options: Any) -> Peer:
    """A peer that is not connected and never will be."""
    return Peer(to, codec(), lambda _: None, **options)


class Sent:
    """A connection that keeps what is sent over it."""

    reader = None

    def __init__(self) -> None:
        self.frames: list[list[Any]] = []

    def send(self, buffers: list[Any], size: int, *, wait: float) -> None:
        self.frames.append(buffers)

    def carry(self, session: object) -> None:
        pass


def sent_when_established(peer: Peer) -> list[list[Any]]:
    connection: Any = Sent()
    peer.established(connection)
    return list(connection.frames)


def test_what_waits_for_a_connection_is_limited(make_node: MakeNode) -> None:
    peer = unconnected(make_node("there").member, send_queue_bytes=1000)
    peer.send([bytes(1001)], 1001)
    with pytest.raises(QueueFull, match="no connection to worker 'there' yet"):
        peer.send([b"x"], 1, wait=0.01)
    peer.send([b"y"], 1, wait=0)  # the loop never waits
    assert sent_when_established(peer) == [[bytes(1001)], [b"y"]]


def test_who_waits_for_room_before_there_is_a_connection_hears_of_the_end(make_node: MakeNode) -> None:
    peer = unconnected(make_node("there").member, send_queue_bytes=1000)
    peer.send([bytes(1001)], 1001)
    lost: list[WorkerLostError] = []

    def wait_for_room() -> None:
        with pytest.raises(WorkerLostError) as caught:
            peer.send([b"x"], 1)
        lost.append(caught.value)

    waiting = threading.Thread(target=wait_for_room)
    waiting.start()
    peer.gone("it has died")
    waiting.join(SOON)
    assert "it has died" in str(lost[0])


def test_only_what_is_large_and_far_away_is_not_captured(make_node: MakeNode) -> None:
    there = make_node("there").member
    for near, size, captured in ((True, 1 << 21, True), (False, 1 << 21, False), (False, 1 << 20, True)):
        peer = unconnected(there, near=near)
        memory = bytearray(size)
        peer.send([memory], size, aliased=True)
        ((piece,),) = sent_when_established(peer)
        assert (piece is not memory) is captured


def test_who_leaves_and_comes_back_under_its_name_may_be_heard_before_its_goodbye(
    make_node: MakeNode,
) -> None:
    node, before, again = make_node("node"), make_node("worker"), make_node("worker")
    again.member = replace(again.member, info=before.member.info)
    node.form_group(before.member, static=False)
    before.form_group(node.member, static=False)
    again.form_group(node.member, static=False)
    before.send(node, 1)
    node.wait_until(lambda: node.received)
    again.send(node, 2)
    until(lambda: again.gone or any(each.hello for each in list(node.connections._greetings)))
    before.leave()
    node.wait_until(lambda: ("worker", 2) in node.received)
    assert again.gone == []


def test_leaving_waits_for_nobody_for_ever(make_node: MakeNode) -> None:
    left, right = pair(make_node)
    left.connections.farewell_seconds = 0.05
    left.send(right, 1)
    right.wait_until(lambda: right.received)
    with stuck(right):
        left.peers[right.member.incarnation].send([bytes(8_000_000)], 8_000_000, wait=False)
        left.leave()


def test_whose_program_has_crashed_is_worth_a_warning(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    left, right = pair(make_node)
    left.send(right, 1)
    right.wait_until(lambda: right.received)
    left.leave(f"{CRASHED}, ValueError: no")
    right.wait_gone()
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.getMessage() == f"worker 'right': worker 'left' (id 0) is gone: {CRASHED}, ValueError: no"


def test_who_is_lost_gets_no_more_messages_and_the_connection_is_closed(make_node: MakeNode) -> None:
    left, right = pair(make_node)
    left.send(right, 1)
    right.wait_until(lambda: right.received)
    right.on_loop(right.connections.lose, right.peers[left.member.incarnation], "it was given up")
    right.on_loop(right.connections.lose, right.peers[left.member.incarnation], "twice")
    assert right.gone == [("left", "it was given up")]
    assert left.wait_gone()[0] == "right"
    until(lambda: right.open_connections() == [])

"""Members who do not play by the rules: what is malformed ends that one's connection, and nothing else."""

from __future__ import annotations

import re
import resource
import socket
import struct
from typing import Any

import rpc
from rpc.bulk.shared_memory.packing import Message, pack
from rpc.runtime.current import current_agent
from rpc.wire.frames import Kind
from rref.requests import CREATE, method_of_object, name_creation
from tests.support import backend
from tests.support.hostile import Hostile, Target, frame, target
from tests.support.orders import add_follower, ask, dismiss, start_followers
from tests.support.serving import open_gate, wait_at_gate
from tests.support.streams import until
from tests.support.tracked import Tracked
from tests.support.workers import TIME_LIMIT, RunWorkers, Workers
from tests.unit.rpc.bulk.shared_memory.ends import open_descriptors

pytestmark = backend.over_sockets

PREFIX = struct.Struct("<QQIIB3x")
"""Of a frame: body length, call id, header length, segment count, kind."""


BROKEN: dict[str, tuple[bytes, str]] = {
    "an unknown kind": (frame(200, {}), "a frame of kind 200, which means nothing to this worker"),
    "a hello": (frame(Kind.HELLO, {}), "a frame of kind 1, which means nothing"),
    "a huge frame": (
        PREFIX.pack(1 << 62, 0, 0, 1, Kind.CALL),
        f"a frame of {1 << 62} bytes is over the limit",
    ),
    "references that are none": (frame(Kind.CALL, {"rref": 3}, [b""]), "has a malformed 'rref' header"),
    "a reference that is none": (frame(Kind.CALL, {"rref": [3]}, [b""]), "a reference is described by 3"),
    "a reference of nobody": (
        frame(Kind.CALL, {"rref": [[5, [5, 1], [6, 1]]]}, [b""]),
        "a reference names incarnation 5, which is not in this group",
    ),
    "a creation of nothing": (frame(32, {}), "does not say which object"),
    "a fetch of nothing": (frame(33, {}), "does not say which object"),
    "a method of nothing": (frame(34, {"object": "x"}), "names an object by x"),
    "no batch": (frame(Kind.CONTROL, {}), "a malformed batch of control messages: None"),
    "a batch of several lines": (
        frame(Kind.CONTROL, {"batch": "\ud800\nworker 'worker0' is gone"}),
        r"a malformed batch of control messages: \\ud800\\nworker 'worker0' is gone",
    ),
    "an unknown topic": (frame(Kind.CONTROL, {"batch": [0, [["gossip", 1]]]}), "on topic 'gossip'"),
    "no control message": (
        frame(Kind.CONTROL, {"batch": [0, [7]]}),
        "a malformed control message: 7",
    ),
    "no reference message": (
        frame(Kind.CONTROL, {"batch": [0, [["rref", ["nonsense", 1]]]]}),
        "a reference message that cannot be",
    ),
    "a chunk of nothing": (
        PREFIX.pack(8, 5, 0, 0, Kind.CHUNK) + bytes(8),
        "a chunk belongs to message 5, which is not open",
    ),
    "memory that was never shared": (
        frame(Kind.IN_SEGMENT, {}, [pack(Message(Kind.CALL, {}, 1, 1, (5,), b""))]),
        "a malformed message in a segment",
    ),
    "a return of nothing": (frame(Kind.SEGMENTS, {"return": [1]}), "a malformed message about shared memory"),
    "a shutdown": (
        frame(Kind.SHUTDOWN, {"message": [0, "entered"]}),
        "a shutdown message in a dynamic group",
    ),
}


def break_rules(at: Target) -> None:
    for number, (name, (data, _)) in enumerate(BROKEN.items()):
        with Hostile(at) as peer:
            peer.join(peer.newcomer(number))
            peer.say(data, frame(Kind.CALL, {}, [b"not even looked at"]))
            assert peer.is_hung_up(), name


def say_goodbye(at: Target) -> None:
    with Hostile(at) as peer:
        peer.join(peer.newcomer(500))
        peer.say(frame(Kind.GOODBYE, {"reason": "\x1b[31m\n" * 1000}))
        assert peer.is_hung_up()


def start_group(run_workers: RunWorkers, time_limit: float = TIME_LIMIT) -> Workers:
    workers = start_followers(run_workers, 1, time_limit, dynamic=True)
    add_follower(workers, dynamic=True)
    return workers


def test_malformed_messages_close_that_connection_and_no_other(run_workers: RunWorkers) -> None:
    workers = start_group(run_workers)
    at = ask(workers[1], target)
    before = ask(workers[1], open_descriptors)
    ask(workers[0], break_rules, at)
    ask(workers[0], say_goodbye, at)
    assert ask(workers[0], rpc.rpc_sync, "worker1", rpc.get_worker_infos) == [
        rpc.WorkerInfo("worker0", 0),
        rpc.WorkerInfo("worker1", 1),
    ]
    more = ask(workers[1], open_descriptors) - before  # the connection with worker0 may have got some
    assert len(more) < len(BROKEN) // 4
    dismiss(workers)
    lines = workers[1].log_lines()
    for number, (line, (name, (_, text))) in enumerate(zip(lines, BROKEN.items(), strict=True)):
        said = rf"worker 'worker1': worker 'evil{number}' \(id {1000 + number}\) is gone: .*{text}"
        assert re.match(said, line), f"{name}: {line}"
    assert workers[0].log_lines() == []


def memory() -> int:
    """The most that this process has ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def my_name() -> str:
    return rpc.get_worker_info().name


def work_on_each_other() -> bool:
    rref: rpc.RRef[list[Any]] = rpc.remote("worker0", list)
    rref.rpc_sync().append(3)
    return bool(rref.to_here() == [3] and rpc.rpc_sync("worker1", my_name) == "worker1")


def say_that_it_ran() -> None:
    print("it ran", flush=True)


def call_with_references_that_never_arrive(at: Target) -> None:
    own = current_agent().group.peers.own
    with Hostile(at) as peer:
        member = peer.newcomer(1)
        peer.join(member)
        me, victim = member.incarnation, at.member.incarnation
        for number, kind in enumerate((Kind.CALL, CREATE), 1):
            call = own.codec.dump_call(say_that_it_ran, (), {}, own)
            if kind == CREATE:
                name_creation(call, (me, 1), (me, 2))
            of_an_unknown_creator = [victim, [victim ^ 1, number], [me, 10 + number]]
            peer.say(frame(kind, {"rref": [of_an_unknown_creator]}, call.buffers, number))
        peer.socket.shutdown(socket.SHUT_WR)
        assert peer.hear_all() == []


def test_calls_of_a_dead_worker_whose_references_never_arrive_end_with_it(run_workers: RunWorkers) -> None:
    workers = start_group(run_workers)
    at = ask(workers[1], target)
    ask(workers[0], call_with_references_that_never_arrive, at)
    dismiss(workers)
    [lost] = workers[1].log_lines()  # what follows from it is not told
    assert "'evil1' (id 1001) is gone" in lost


def create_what_waits_for_itself(at: Target) -> None:
    own = current_agent().group.peers.own
    with Hostile(at) as peer:
        member = peer.newcomer(1)
        peer.join(member)
        me = member.incarnation
        on = {
            1: (1, {}),
            2: (2, {"concurrency": 1}),
            3: (4, {}),
            4: (3, {}),
            5: (6, {"concurrency": 1}),
            6: (5, {}),
        }
        for number, (target, limits) in on.items():
            call = own.codec.dump_call(method_of_object, (), {}, own)
            name_creation(call, (me, number), (me, 10 + number))
            header = {"object": [me, target], "method": "append", **limits}
            peer.say(frame(CREATE, header, call.buffers, number))
        peer.socket.shutdown(socket.SHUT_WR)
        peer.hear_all()


def wait_until_nothing_is_kept() -> None:
    references = current_agent().extensions["rref"]
    until(lambda: not any(references.counts().values()))


def test_creations_of_a_dead_worker_that_wait_for_each_other_end_with_it(run_workers: RunWorkers) -> None:
    workers = start_group(run_workers)
    at = ask(workers[1], target)
    ask(workers[0], create_what_waits_for_itself, at)
    ask(workers[1], wait_until_nothing_is_kept)
    dismiss(workers)
    [lost] = workers[1].log_lines()  # what follows from it is not told
    assert "'evil1' (id 1001) is gone" in lost


def announce_much(at: Target) -> None:
    for number, kind in enumerate((Kind.CALL, Kind.REPLY, Kind.CONTROL)):
        with Hostile(at) as peer:
            peer.join(peer.newcomer(number))
            peer.say(PREFIX.pack(8 << 30, 1, 0, 1, kind), bytes(1 << 20))  # and no more


def test_what_is_announced_and_never_sent_takes_no_memory(run_workers: RunWorkers) -> None:
    workers = start_group(run_workers)
    at = ask(workers[1], target)
    before = ask(workers[1], memory)
    ask(workers[0], announce_much, at)
    assert ask(workers[1], work_on_each_other)
    assert ask(workers[1], memory) - before < 30
    dismiss(workers)


# ---- a member that only some have met


def hear_reply(peer: Hostile) -> None:
    answer = peer.hear()
    while answer is not None and answer.kind == Kind.ALIVE:  # the worker has asked what takes so long
        answer = peer.hear()
    assert answer is not None
    assert answer.kind == Kind.REPLY


def leave_something(at: Target) -> None:
    call = current_agent().group.peers.own.codec.dump_call(
        Tracked, ("left",), {}, current_agent().group.peers.own
    )
    with Hostile(at) as peer:
        member = peer.newcomer(1)
        peer.join(member)
        name_creation(call, (member.incarnation, 1), (member.incarnation, 2))
        peer.say(frame(CREATE, {}, call.buffers))
        hear_reply(peer)


def test_what_a_member_left_is_freed_though_not_all_have_met_it(run_workers: RunWorkers) -> None:
    workers = start_group(run_workers)
    at = ask(workers[1], target)
    ask(workers[0], leave_something, at)
    assert workers[1].wait_for("freed") == "left"
    dismiss(workers)


# ---- an answer to somebody else's call


def answer_for_others(at: Target) -> None:
    with Hostile(at) as peer:
        peer.join(peer.newcomer(1))
        for call_id in range(1, 200):
            peer.say(
                frame(
                    Kind.REPLY,
                    {},
                    current_agent().group.peers.own.codec.dumps("forged", None).buffers,
                    call_id,
                )
            )
        peer.hear_all()


def call_and_wait() -> None:
    waiting.append(rpc.rpc_async("worker0", wait_at_gate, args=("", "genuine")))


waiting: list[rpc.Future[Any]] = []


def wait_for_answer() -> Any:
    return waiting.pop().wait()


def test_only_who_was_called_can_answer(run_workers: RunWorkers) -> None:
    workers = start_group(run_workers)
    at = ask(workers[1], target)
    ask(workers[1], call_and_wait)
    workers[0].wait_for("at the gate")
    ask(workers[0], answer_for_others, at)
    ask(workers[0], open_gate)
    assert ask(workers[1], wait_for_answer) == "genuine"
    dismiss(workers)
    assert re.search(
        r"worker 'evil1' .* malformed message: an answer to a call that worker 'worker0' got",
        workers[1].log.read_text(),
    )


# ---- a member that takes, and does not do its part


# ---- members that come and go

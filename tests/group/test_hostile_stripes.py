"""Peers that have stripes, or want to, and do not play by the rules: that ends their connection only."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch

import rpc
from rpc.bulk.striping.plan import CHUNK_BYTES
from rpc.wire.frames import PREAMBLE, Kind, encode
from tests.group.test_stripes import ACROSS, descriptors, has_only, open_stripes
from tests.support.hostile import Hostile, Target, frame, target
from tests.support.orders import add_follower, ask, dismiss, start_followers
from tests.support.workers import RunWorkers

LIMIT = 16 << 20
OPTIONS: dict[str, Any] = {**ACROSS, "dynamic": True, "tcp_stripes": 2, "max_message_bytes": LIMIT}


def about_stripes(**header: Any) -> bytes:
    return frame(Kind.STRIPES, header, call_id=0)


def opening(number: int, kind: int = Kind.CALL, length: int = 2 * CHUNK_BYTES) -> bytes:
    """Opens a message of that length."""
    (head, _), _ = encode(kind, 1, {}, [bytes(length)])
    return frame(Kind.STRIPED, {}, [head], call_id=number)


def chunk(number: int, offset: int, length: int = CHUNK_BYTES) -> bytes:
    header = number.to_bytes(8, "little") + offset.to_bytes(8, "little") + length.to_bytes(4, "little")
    return header + bytes(length)


WITHOUT_STRIPES: dict[str, tuple[bytes, str]] = {
    "unheard of": (about_stripes(what=1), "an unknown message about stripes"),
    "a number that is none": (about_stripes(ask="many"), "a malformed message about stripes"),
    "too few": (about_stripes(ask=1), "a malformed message about stripes"),
    "an offer by who connects": (about_stripes(offer=[2, bytes(16)]), "is not the one to offer any"),
    "an offer that is none": (about_stripes(offer=7), "a malformed message about stripes"),
    "ready without an offer": (about_stripes(ready=2), "stripes are ready which are not there"),
    "ready with none": (about_stripes(ask=2) + about_stripes(ready=2), "ready which are not there"),
    "ready with far too many": (about_stripes(ask=2) + about_stripes(ready=1 << 40), "which are not there"),
    "none of none": (about_stripes(ask=2) + about_stripes(ready="all"), "a malformed message about stripes"),
    "leave without stripes": (about_stripes(leaving=True), "takes leave of stripes that it does not have"),
    "leave not asked for": (about_stripes(left=True), "lets this worker go, which does not leave"),
    "a message": (opening(0), "a malformed opening of a message over stripes"),
}
"""What is said on the connection, and what the log says then."""

WITH_STRIPES: dict[str, tuple[bytes, bytes, str]] = {
    "a message out of order": (opening(1), b"", "message 1 was opened over stripes, where 0 is next"),
    "a message twice": (opening(0) * 2, b"", "message 0 was opened over stripes, where 1 is next"),
    "a huge message": (opening(0, length=LIMIT + 1), b"", f"is over the limit of {LIMIT}"),
    "stripes refused": (about_stripes(refuse="no"), b"", "it refuses the stripes that it has"),
    "a message about messages": (opening(0, Kind.STRIPED), b"", "a message about stripes over stripes"),
    "half an opening": (frame(Kind.STRIPED, {}, [b"\0"], 0), b"", "an opening of 1 bytes is too short"),
    "a long opening": (frame(Kind.STRIPED, {}, [bytes(40_000)], 0), b"", "a malformed opening of a message"),
    "no message": (frame(Kind.STRIPED, {}, [], 0), b"", "a malformed opening of a message over stripes"),
    "a chunk twice": (opening(0), chunk(0, 0) * 2, "the chunk at 0 of message 0 has come twice"),
    "an overlap": (opening(0), chunk(0, 0) + chunk(0, 100), "no chunk of 262144 bytes begins at 100"),
    "a chunk beyond the end": (opening(0), chunk(0, 2 * CHUNK_BYTES), "begins at 524288 in message 0"),
    "a chunk of nothing": (b"", chunk(1 << 30, 0), "a chunk of message 1073741824, where 0 is next"),
    "an end": (opening(0), b"", "a stripe of its connection was closed by the other side"),
}
"""What is said on the connection, what on a stripe, and what the log says then."""


@contextlib.contextmanager
def stripes(peer: Hostile) -> Iterator[list[Hostile]]:
    """Two stripes of a connection, opened as they should be."""
    peer.say(about_stripes(ask=2))
    while (heard := peer.hear()) is not None and heard.kind != Kind.STRIPES:
        pass
    assert heard is not None
    count, token = heard.header["offer"]
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(Hostile(peer.at, "tcp")) for _ in range(count)]
        for number, each in enumerate(opened):
            each.say(PREAMBLE, frame(Kind.STRIPE, {"token": token, "number": number}, call_id=0))
            welcome = each.hear()
            assert welcome is not None
            assert welcome.kind == Kind.WELCOME
        peer.say(about_stripes(ready=count))
        yield opened


def break_rules(at: Target) -> None:
    for number, (name, (said, _)) in enumerate(WITHOUT_STRIPES.items()):
        with Hostile(at, "tcp") as peer:
            peer.join(peer.newcomer(number))
            peer.say(said)
            assert all(heard.kind == Kind.STRIPES for heard in peer.hear_all()), name
    for number, (name, (said, on_stripe, _)) in enumerate(WITH_STRIPES.items(), len(WITHOUT_STRIPES)):
        with Hostile(at, "tcp") as peer:
            peer.join(peer.newcomer(number))
            with stripes(peer) as (first, second):
                peer.say(said)
                first.say(on_stripe)
                if name == "an end":
                    second.socket.close()
                assert peer.is_hung_up(), name
                with contextlib.suppress(ConnectionResetError):
                    assert first.socket.recv(1) == b""


def test_malformed_messages_close_that_connection_and_no_other(run_workers: RunWorkers) -> None:
    workers = start_followers(run_workers, 1, **OPTIONS)
    add_follower(workers, **OPTIONS)
    assert ask(workers[0], open_stripes, "worker1", 2)
    before = ask(workers[1], descriptors)
    ask(workers[0], break_rules, ask(workers[1], target))
    assert ask(workers[1], has_only, before)
    assert ask(workers[0], still_sends) == 3 << 20
    dismiss(workers)
    lines = [line for line in workers[1].log.read_text().splitlines() if "evil" in line]
    texts = [*(text for _, text in WITHOUT_STRIPES.values()), *(text for _, _, text in WITH_STRIPES.values())]
    for number, (line, text) in enumerate(zip(lines, texts, strict=True)):
        assert re.match(
            rf"worker 'evil{number}' \(id {1000 + number}\) is gone: .*{re.escape(text)}", line
        ), line


def still_sends() -> int:
    return int(rpc.rpc_sync("worker1", torch.numel, args=(torch.ones(3 << 20),)))

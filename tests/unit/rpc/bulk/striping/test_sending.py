"""The sending half of a set of stripes: who takes gets more, and callers wait for room."""

from __future__ import annotations

import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rpc.bulk.striping import plan
from rpc.bulk.striping import sending as sending_module
from rpc.bulk.striping.plan import CHUNK_BYTES
from rpc.runtime.loop import LoopThread
from rpc.transport import CAPTURED_BYTES, ConnectionClosed, QueueFull
from rpc.wire.frames import encode
from tests.support.ctrl_c import interrupted_at
from tests.support.streams import TINY_BUFFER, Sockets
from tests.unit.rpc.bulk.striping.ends import Receiving, Sending, large, read_chunk

SIZE = 8 * CHUNK_BYTES


def test_a_stripe_that_takes_nothing_holds_up_one_chunk_only(loop: LoopThread, sockets: Sockets) -> None:
    (stuck, _), (here, there) = sockets(buffer_bytes=TINY_BUFFER), sockets()
    sending = Sending(loop, [stuck, here])
    sending.send(large(1, SIZE))
    offsets = [read_chunk(there)[1] for _ in range(7)]
    assert offsets == [index * CHUNK_BYTES for index in range(1, 8)]
    assert [number for number, _ in sending.openings.noted] == [0]
    sending.close()


def test_callers_wait_for_room_as_long_as_they_like(loop: LoopThread, sockets: Sockets) -> None:
    here, there = sockets(buffer_bytes=TINY_BUFFER)
    sending = Sending(loop, [here], queue_limit=SIZE)
    sending.send(large(1, 2 * SIZE))
    with pytest.raises(QueueFull, match="the peer does not take what is queued for it"):
        sending.send(large(2, SIZE), wait=0.01)
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(sending.send, large(3, SIZE))
        read = [read_chunk(there) for _ in range(16)]
        assert sent.result()
    assert b"".join(data for _, _, data in read) == bytes([1]) * 2 * SIZE
    sending.close()


def test_the_loop_never_waits_for_room(loop: LoopThread, sockets: Sockets) -> None:
    sending = Sending(loop, [sockets(buffer_bytes=TINY_BUFFER)[0]], queue_limit=1)
    for call_id in range(3):
        assert loop.call(lambda call_id=call_id: sending.send(large(call_id, SIZE), wait=0))
    sending.close()


def test_closing_ends_the_wait_and_the_sending(loop: LoopThread, sockets: Sockets) -> None:
    sending = Sending(loop, [sockets(buffer_bytes=TINY_BUFFER)[0]], queue_limit=1)
    sending.send(large(1, SIZE))
    begun = threading.Event()

    def send() -> None:
        begun.set()
        sending.send(large(2, SIZE))

    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(send)
        begun.wait()
        sending.close()
        with pytest.raises(ConnectionClosed, match="the connection to the peer is closed"):
            sent.result()


def test_what_is_not_long_may_change_once_it_is_sent(loop: LoopThread, sockets: Sockets) -> None:
    here, there = sockets(buffer_bytes=TINY_BUFFER)
    sending = Sending(loop, [here])
    memory = bytearray(b"a" * CAPTURED_BYTES)
    sending.send(encode(5, 1, {}, [memoryview(memory)]), aliased=True)
    memory[:] = b"x" * CAPTURED_BYTES
    data = b"".join(read_chunk(there)[2] for _ in range(CAPTURED_BYTES // CHUNK_BYTES))
    assert data == b"a" * CAPTURED_BYTES
    sending.close()


def test_a_broken_stripe_is_reported(loop: LoopThread, sockets: Sockets) -> None:
    here, there = sockets()
    there.close()
    sending = Sending(loop, [here])
    sending.send(large(1, SIZE))
    assert sending.failures.wait_for(1) == ["broke: Broken pipe"]
    sending.close()


def test_it_is_finished_when_all_is_out_and_takes_no_more(loop: LoopThread, sockets: Sockets) -> None:
    here, there = sockets(buffer_bytes=TINY_BUFFER)
    sending = Sending(loop, [here])
    sending.send(large(1, SIZE))
    sending.finish()
    assert not sending.send(large(2, SIZE))
    assert not sending.finished.noted
    for _ in range(8):
        read_chunk(there)
    assert sending.finished.wait_for(1)
    sending.close()


def test_it_is_finished_at_once_when_there_is_nothing_to_send(loop: LoopThread, sockets: Sockets) -> None:
    sending = Sending(loop, [sockets()[0]])
    sending.finish()
    assert sending.finished.noted
    sending.close()


def test_it_is_finished_when_it_is_closed(loop: LoopThread, sockets: Sockets) -> None:
    sending = Sending(loop, [sockets(buffer_bytes=TINY_BUFFER)[0]])
    sending.send(large(1, SIZE))
    sending.finish()
    sending.close()
    assert sending.finished.noted


# ---- Ctrl-C


def is_of_the_sender(path: str) -> bool:
    return path in (sending_module.__file__, plan.__file__)


def test_a_message_in_whose_sending_ctrl_c_comes_is_sent_whole_or_not_at_all(
    loop: LoopThread, sockets: Sockets
) -> None:
    """And those after it as ever."""
    here, there = sockets()
    receiving = Receiving(loop, [there])
    sender = Sending(loop, [here], receiving.open)
    line, interrupted, received = 0, True, 0
    while interrupted:
        line += 1
        interrupted = interrupted_at(
            line,
            functools.partial(sender.send, large(line, 300_000), aliased=True),
            is_of_the_sender,
        )
        sender.send(large(1000 + line, 100))
        while (1000 + line, [b"\1" * 100]) not in receiving.messages.noted:
            received += 1
            receiving.messages.wait_for(received)
    assert line > 10
    sender.finish()
    assert sender.finished.wait_for(1)
    receiving.when_idle()
    assert receiving.idle.wait_for(1)
    assert all(
        len(data) == (300_000 if call_id < 1000 else 100) for call_id, (data,) in receiving.messages.noted
    )
    assert sender.sender._unsent_bytes <= 0
    sender.close()
    receiving.close()


def test_what_was_queued_before_ctrl_c_goes_out_though_nothing_follows(
    loop: LoopThread, sockets: Sockets
) -> None:
    for line in itertools.count(1):
        here, there = sockets()
        receiving = Receiving(loop, [there])
        sender = Sending(loop, [here], receiving.open)
        interrupted = interrupted_at(
            line, functools.partial(sender.send, large(line, 300_000)), is_of_the_sender
        )
        if sender.sender._unsent_bytes > 0 or not interrupted:
            receiving.messages.wait_for(1)
        sender.close()
        receiving.close()
        if not interrupted:
            break

"""How calls to ``farcall.serve`` end: cancelled, at their deadline, or as the server is stopped."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from farcall.client import AsyncClient, CallError, Client
from farcall.serving import Limits
from tests.support.gateway import Connect, Gate, Scale, Serve

ROOT = Path(__file__).resolve().parent.parent.parent.parent
CODE = grpc.StatusCode


def give_up_once_begun(client: Client, name: str, gate: Gate) -> None:
    """Call until a deadline has passed on a call that had begun, and not before, as on a loaded machine."""
    begun = False
    while not begun:
        with pytest.raises(CallError) as caught:
            client.call(name, timeout=0.2)
        assert caught.value.code is CODE.DEADLINE_EXCEEDED
        begun = gate.entered.acquire(blocking=False)


def test_an_async_function_is_cancelled_at_the_deadline(serve: Serve, connect: Connect, gate: Gate) -> None:
    give_up_once_begun(connect(serve({"wait": gate.without_end})), "wait", gate)
    assert gate.cancelled.wait(60)


def test_a_stream_that_nobody_reads_any_more_is_closed(serve: Serve, connect: Connect, gate: Gate) -> None:
    words = connect(serve({"words": gate.words})).stream("words")
    assert next(words) == "one"
    words.close()  # type: ignore[attr-defined]
    assert gate.closed.wait(60)


def test_a_client_that_vanishes_has_its_calls_cancelled(serve: Serve, gate: Gate) -> None:
    server = serve({"wait": gate.without_end})
    program = f"import farcall.client as c; c.connect('localhost:{server.port}').call('wait')"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    assert gate.entered.acquire(timeout=60)
    process.kill()
    process.wait()
    assert gate.cancelled.wait(60)


def test_a_client_that_vanishes_as_it_is_sent_streams_is_no_error(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    stepped, closed = threading.Semaphore(0), threading.Semaphore(0)

    def endless() -> Iterator[bytes]:
        try:
            while True:
                stepped.release()
                yield bytes(1 << 20)
        finally:
            closed.release()

    caplog.set_level("INFO")
    server = serve({"endless": endless})
    client = connect(server)
    streams = [client.stream("endless") for _ in range(8)]
    for each in streams:
        assert len(next(each)) == 1 << 20
    for _ in range(16):  # so that some are being sent
        assert stepped.acquire(timeout=60)
    client.close()
    for _ in streams:
        assert closed.acquire(timeout=60)
    server.stop()
    ends = [record.getMessage() for record in caplog.records if record.name == "farcall.access"]
    assert len(ends) == 8
    assert all("endless CANCELLED" in each for each in ends)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def code_of(client: Client, name: str) -> grpc.StatusCode:
    with pytest.raises(CallError) as caught:
        client.call(name, timeout=60)
    return caught.value.code


def test_a_stopping_server_answers_what_it_has_taken_and_takes_no_more(
    serve: Serve, connect: Connect, gate: Gate
) -> None:
    server = serve({"gate": gate})
    client = connect(server)
    with ThreadPoolExecutor() as pool:
        taken = pool.submit(client.call, "gate")
        assert gate.entered.acquire(timeout=60)
        stopping = pool.submit(server.stop)
        while code_of(client, "nobody") is CODE.NOT_FOUND:
            pass  # until the server has heard that it is to stop
        assert code_of(client, "nobody") is CODE.UNAVAILABLE
        gate.open.set()
        assert taken.result(60) == "through"
        stopping.result(60)
    assert server.wait(0)


def test_a_function_that_does_not_end_holds_up_no_one_for_longer_than_the_grace(
    serve: Serve, connect: Connect, gate: Gate
) -> None:
    server = serve({"gate": gate})
    client = connect(server)
    with ThreadPoolExecutor() as pool:
        taken = pool.submit(client.call, "gate")
        assert gate.entered.acquire(timeout=60)
        assert server.stop(0.1) == 1
        assert taken.exception(60).code is CODE.UNAVAILABLE  # type: ignore[union-attr]


def test_a_function_that_nobody_waits_for_keeps_its_place(serve: Serve, connect: Connect, gate: Gate) -> None:
    client = connect(serve({"gate": gate, "scale": Scale()}, limits=Limits(in_flight=1)))
    give_up_once_begun(client, "gate", gate)
    with pytest.raises(CallError) as caught:
        client.call("scale", 1.0, timeout=0.2)
    assert caught.value.code is CODE.DEADLINE_EXCEEDED
    gate.open.set()
    assert float(client.call("scale", 1.0)) == 3.0


def test_a_stream_that_is_given_up_in_the_middle_of_a_step_is_closed_after_it(
    serve: Serve, connect: Connect, gate: Gate
) -> None:
    def steps() -> Iterator[int]:
        try:
            yield 1
            gate.entered.release()
            assert gate.open.wait(60)
            yield 2
        finally:
            gate.closed.set()

    words = connect(serve({"steps": steps})).stream("steps")
    assert next(words) == 1
    assert gate.entered.acquire(timeout=60)
    words.close()  # type: ignore[attr-defined]
    gate.open.set()
    assert gate.closed.wait(60)


def test_a_server_that_is_stopped_under_load_runs_nothing_without_an_answer_and_refuses_the_rest(
    serve: Serve,
) -> None:
    ran: list[int] = []
    server = serve({"run": ran.append})
    separate = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each client

    async def call_until_it_is_gone(seen: Counter[grpc.StatusCode], busy: asyncio.Event) -> None:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", separate)
        async with AsyncClient(channel, None) as client:
            while not server.wait(0):
                try:
                    await client.call("run", 1, timeout=60)
                    seen[CODE.OK] += 1
                    busy.set()
                except CallError as error:
                    seen[error.code] += 1

    async def main() -> Counter[grpc.StatusCode]:
        seen: Counter[grpc.StatusCode] = Counter()
        begun = [asyncio.Event() for _ in range(64)]
        async with asyncio.TaskGroup() as group:
            for busy in begun:
                group.create_task(call_until_it_is_gone(seen, busy))
            for busy in begun:
                await busy.wait()
            await asyncio.to_thread(server.stop)
        return seen

    seen = asyncio.run(main())
    assert set(seen) == {CODE.OK, CODE.UNAVAILABLE}
    assert seen[CODE.OK] == len(ran)

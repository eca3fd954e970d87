"""How much ``farcall.serve`` takes at once, and who may call."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

import farcall
from farcall import client as clients
from farcall.client import CallError, ServedError
from farcall.serving import Batching, Endpoint, Limits, Server
from farcall.v1 import service_pb2
from tests.support.certificates import Authority
from tests.support.gateway import Connect, Gate, Scale, Serve, count

CODE = grpc.StatusCode
TOKEN = "a token of one caller"


def test_what_is_more_than_a_server_takes_is_refused_at_once(
    serve: Serve, connect: Connect, gate: Gate
) -> None:
    client = connect(serve({"gate": gate}, limits=Limits(in_flight=1, queue=1)))
    with ThreadPoolExecutor() as pool:
        running = pool.submit(client.call, "gate")
        assert gate.entered.acquire(timeout=60)
        others = [pool.submit(client.call, "gate") for _ in range(2)]
        refused = next(as_completed(others, timeout=60)).exception()
        gate.open.set()
        assert isinstance(refused, ServedError)
        assert refused.code is CODE.RESOURCE_EXHAUSTED
        assert "2 calls run or wait" in refused.text
        assert running.result(60) == "through"


def test_a_step_of_an_asynchronous_stream_takes_a_place(serve: Serve, connect: Connect, gate: Gate) -> None:
    client = connect(serve({"words": gate.words, "scale": Scale()}, limits=Limits(in_flight=1)))
    words = client.stream("words")
    assert next(words) == "one"
    assert gate.entered.acquire(timeout=60)  # the second step has begun
    with pytest.raises(CallError) as caught:
        client.call("scale", 1.0, timeout=0.2)
    assert caught.value.code is CODE.DEADLINE_EXCEEDED
    words.close()  # type: ignore[attr-defined]
    assert float(client.call("scale", 1.0)) == 3.0


def test_a_caller_has_a_limit_of_his_own(serve: Serve, connect: Connect, gate: Gate) -> None:
    tokens = {"ann": "the token of ann...", "bob": "the token of bob..."}
    server = serve({"gate": gate, "scale": Scale()}, tokens=tokens, limits=Limits(per_caller=1))
    ann, bob = (connect(server, token=token) for token in tokens.values())
    with ThreadPoolExecutor() as pool:
        running = pool.submit(ann.call, "gate")
        assert gate.entered.acquire(timeout=60)
        with pytest.raises(ServedError, match="1 calls of ann run or wait") as caught:
            ann.call("scale", 1.0)
        assert caught.value.code is CODE.RESOURCE_EXHAUSTED
        assert float(bob.call("scale", 1.0)) == 3.0
        gate.open.set()
        running.result(60)


def test_a_message_that_is_too_large_is_refused(serve: Serve, connect: Connect) -> None:
    client = connect(serve({"scale": Scale()}, limits=Limits(message_bytes=4096)))
    with pytest.raises(CallError) as caught:
        client.call("scale", np.zeros(4096))
    assert caught.value.code is CODE.RESOURCE_EXHAUSTED
    assert float(client.call("scale", 1.0)) == 3.0


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests_are_refused_unless_the_server_takes_them(
    serve: Serve, algorithm: grpc.Compression
) -> None:
    asked = service_pb2.CallRequest(call=service_pb2.Invocation(name="size"))
    asked.call.args.add().binary = bytes(1 << 20)

    def ask(server: Server) -> Any:
        with grpc.insecure_channel(f"localhost:{server.port}", compression=algorithm) as channel:
            call = channel.unary_unary("/farcall.v1.FarcallService/Call")
            return service_pb2.CallResponse.FromString(call(asked.SerializeToString(), timeout=60))

    with pytest.raises(grpc.RpcError) as caught:
        ask(serve({"size": len}))
    assert caught.value.code() is CODE.UNIMPLEMENTED
    assert ask(serve({"size": len}, limits=Limits(compressed=True))).value.integer == 1 << 20


def test_a_request_of_too_many_small_values_is_refused(serve: Serve, connect: Connect) -> None:
    client = connect(serve({"size": len}, limits=Limits(message_bytes=1 << 20)))
    assert client.call("size", [None] * 5_000) == 5_000
    with pytest.raises(
        ServedError, match="values in the request would take more than the 1048576 bytes"
    ) as caught:
        client.call("size", [None] * 50_000)
    assert caught.value.code is CODE.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("timeout", [0, 0.0, None])
def test_a_timeout_of_0_is_none(serve: Serve, connect: Connect, timeout: float | None) -> None:
    client = connect(serve({"same": float, "count": count}))
    assert client.call("same", 2.0, timeout=timeout) == 2.0
    assert client.batch([("same", [2.0])], timeout=timeout) == [2.0]
    assert list(client.stream("count", 2, timeout=timeout)) == [0, 1]
    assert [each.name for each in client.describe("same", timeout=timeout)] == ["same"]


def test_a_stream_of_what_is_no_generator_says_how_to_call_it(serve: Serve, connect: Connect) -> None:
    client = connect(serve({"scale": Scale()}))
    with pytest.raises(ServedError, match=r"'scale' is no generator, and has one result: use client\.call"):
        list(client.stream("scale", 1.0))


def test_calls_that_come_together_are_run_as_one(serve: Serve, connect: Connect) -> None:
    calls: list[int] = []

    def double(rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        return rows * 2

    client = connect(serve({"double": Endpoint(double, batching=Batching(8, 60.0))}))
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda value: client.call("double", np.full((1, 2), value)), range(8)))
    assert calls == [8]
    assert [result.tolist() for result in results] == [[[2 * value] * 2] for value in range(8)]


# ---- who may call


@pytest.mark.parametrize(
    ("token", "text"), [(None, "wants a token"), ("another token......", "none of this server's")]
)
def test_who_has_no_token_is_refused(serve: Serve, connect: Connect, token: str | None, text: str) -> None:
    server = serve({"scale": Scale()}, tokens=TOKEN)
    with pytest.raises(CallError, match=text) as caught:
        connect(server, token=token).call("scale", 1.0)
    assert caught.value.code is CODE.UNAUTHENTICATED
    assert float(connect(server, token=TOKEN).call("scale", 1.0)) == 3.0


def test_certificates_of_the_same_authority_may_call(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    tls = ours.issue(host="localhost")
    server = serve({"scale": Scale()}, tls=tls)
    mine = clients.Tls(ours.certificate, tls.cert, tls.key)
    assert float(connect(server, tls=mine).call("scale", 1.0)) == 3.0
    foreign = others.issue(host="localhost")
    for wrong in (clients.Tls(ours.certificate), clients.Tls(ours.certificate, foreign.cert, foreign.key)):
        with pytest.raises(CallError) as caught:
            connect(server, tls=wrong).call("scale", 1.0)
        assert caught.value.code is CODE.UNAVAILABLE


def test_the_name_in_a_certificate_is_its_owners(
    serve: Serve, connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those here have no common name, only the names of hosts."""
    caplog.set_level("INFO", "farcall.access")
    tls = Authority(tmp_path, "ours").issue(host="localhost")
    server = serve({"scale": Scale()}, tls=tls)
    connect(server, tls=clients.Tls(tls.ca, tls.cert, tls.key)).call("scale", 1.0)
    server.stop()
    assert caplog.messages[-1].startswith("localhost scale OK ")


def test_a_token_that_no_client_can_send(serve: Serve, connect: Connect) -> None:
    with pytest.raises(ValueError, match="it must be printable ASCII"):
        connect(serve({"scale": Scale()}), token="a token of\ntwo lines")


def test_a_certificate_without_its_key() -> None:
    with pytest.raises(ValueError, match="cert and key belong together"):
        clients.Tls("ca.pem", "cert.pem")


@pytest.mark.parametrize("place", ["fifo", "/dev/zero", "empty"])
def test_a_client_reads_certificates_from_regular_files_only(tmp_path: Path, place: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=f"{place} is no file in PEM"):
        clients.connect("localhost:8443", tls=clients.Tls(str(tmp_path / place)))


@pytest.mark.parametrize(
    ("endpoints", "options", "text"),
    [
        ({}, {}, "there is nothing to serve"),
        ({"": Scale()}, {}, "'' cannot be a name of what is served"),
        ({1: Scale()}, {}, "1 cannot be a name of what is served"),
        ({"scale": Scale()}, {"port": 8443, "metrics_port": 8443}, "port and metrics_port are both 8443"),
        ({"scale": Scale()}, {"tokens": ""}, "tokens is empty"),
        (
            {"scale": Scale()},
            {"tokens": {"ann": "\u00e9" * 20}},
            "the token of ann .* printable ASCII",
        ),
        ({"scale": Scale()}, {"host": "0.0.0.0"}, r"anyone who reaches 0\.0\.0\.0 could call"),
        (
            {"scale": Scale()},
            {"metrics_port": 0, "metrics_host": "127.0.0.2"},
            r"anyone who reaches 127\.0\.0\.2 could read metrics",
        ),
    ],
)
def test_what_can_be_told_before_a_server_begins(
    endpoints: dict[Any, Any], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        farcall.serve(endpoints, **options)

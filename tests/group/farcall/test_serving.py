"""``farcall.serve`` and its clients: what is called, how it ends, who may, and how much at once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from torch import nn

import farcall
import rpc
from farcall import client as clients
from farcall.client import CallError, Client, ServedError
from farcall.serving import Batching, Endpoint, Limits, Server, TensorSpec
from farcall.serving.tensors import TorchTensors
from farcall.v1 import service_pb2, value_pb2
from rref import RemoteModule
from tests.support.certificates import Authority
from tests.support.effort import EFFORT
from tests.support.serving import in_worker0

ROOT = Path(__file__).resolve().parent.parent.parent.parent
CODE = grpc.StatusCode
TOKEN = "a token of one caller"


class Scale(nn.Module):
    """Scales rows."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(3.0))

    def forward(self, rows: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        """Scale."""
        return rows * self.by + shift


def count(to: int) -> Iterator[int]:
    yield from range(to)


def fail(text: str) -> None:
    raise LookupError(text)


class Gate:
    """Something to call that waits until it is opened, and tells how far its calls are."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.cancelled = threading.Event()
        self.closed = threading.Event()

    def __call__(self) -> str:
        self.entered.release()
        assert self.open.wait(60)
        return "through"

    async def without_end(self) -> None:
        self.entered.release()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def words(self) -> AsyncIterator[str]:
        try:
            yield "one"
            self.entered.release()
            await asyncio.Event().wait()
        finally:
            self.closed.set()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def begin(endpoints: dict[str, Any], **options: Any) -> Server:
        servers.append(farcall.serve(endpoints, **options))
        return servers[-1]

    yield begin
    for server in servers:
        server.stop(0.0)


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def begin(server: Server, **options: Any) -> Client:
        made.append(clients.connect(f"localhost:{server.port}", **options))
        return made[-1]

    yield begin
    for each in made:
        each.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


Serve = Callable[..., Server]
Connect = Callable[..., Client]


# ---- calls


def test_functions_and_modules_are_called_with_arrays(serve: Serve, connect: Connect) -> None:
    client = connect(serve({"scale": Scale(), "add": torch.add, "count": count}))
    assert client.call("scale", np.ones((2, 2), np.float32), shift=1.0).tolist() == [[4, 4], [4, 4]]
    assert client.call("add", np.arange(3), 2, alpha=10).tolist() == [20, 21, 22]
    assert list(client.stream("count", 3)) == [0, 1, 2]


def test_a_batch_has_a_result_or_an_error_for_each(serve: Serve, connect: Connect) -> None:
    client = connect(serve({"fail": fail, "scale": Scale()}))
    first, second, third = client.batch(
        [("scale", [2.0]), ("fail", ["no"]), ("scale", [2.0], {"shift": 1.0})]
    )
    assert (float(first), float(third)) == (6.0, 7.0)
    assert isinstance(second, ServedError)
    assert (second.type, second.text, second.code) == ("LookupError", "no", CODE.INTERNAL)


def test_calls_in_asyncio(serve: Serve) -> None:
    async def main(server: Server) -> tuple[Any, list[Any], list[Any]]:
        async with clients.connect_async(f"localhost:{server.port}") as client:
            words = [each async for each in client.stream("count", 3)]
            return await client.call("scale", 2.0), words, await client.batch([("scale", [1.0])])

    result, words, several = asyncio.run(main(serve({"scale": Scale(), "count": count})))
    assert (float(result), words, float(several[0])) == (6.0, [0, 1, 2], 3.0)


def test_description(serve: Serve, connect: Connect) -> None:
    rows = TensorSpec("float32", (-1, 2))
    client = connect(serve({"scale": Endpoint(Scale(), inputs={"rows": rows}, batching=Batching())}))
    (found,) = client.describe()
    assert (found.name, found.doc, found.batched, found.streams) == ("scale", "Scales rows.", True, False)
    given, shift = found.parameters
    assert (given.name, given.type, list(given.tensor.shape)) == ("rows", "torch.Tensor", [-1, 2])
    assert (shift.name, shift.optional, shift.default_value) == ("shift", True, "0.0")


@pytest.mark.parametrize(
    ("name", "args", "code", "text"),
    [
        ("nobody", [], CODE.NOT_FOUND, "nothing is served as 'nobody'; there are count, fail, scale"),
        ("scale", [], CODE.INVALID_ARGUMENT, "missing a required argument: 'rows'"),
        ("scale", [1.0], CODE.INVALID_ARGUMENT, "rows must be a tensor float32[-1, 2], float came"),
        ("count", [3], CODE.INVALID_ARGUMENT, "'count' is called by StreamCall"),
        ("fail", ["as told"], CODE.INTERNAL, "as told"),
    ],
)
def test_errors(
    serve: Serve, connect: Connect, name: str, args: list[Any], code: grpc.StatusCode, text: str
) -> None:
    scale = Endpoint(Scale(), inputs={"rows": TensorSpec("float32", (-1, 2))})
    with pytest.raises(ServedError) as caught:
        connect(serve({"scale": scale, "count": count, "fail": fail})).call(name, *args)
    assert caught.value.code is code
    assert text in caught.value.text
    assert not caught.value.traceback


def test_tracebacks_are_shown_where_the_server_says_so(serve: Serve, connect: Connect) -> None:
    with pytest.raises(ServedError) as caught:
        connect(serve({"fail": fail}, tracebacks=True)).call("fail", "no")
    assert "raise LookupError(text)" in caught.value.traceback
    assert "farcall/serving" not in caught.value.traceback


def test_a_client_without_a_server() -> None:
    with clients.connect("localhost:1") as client, pytest.raises(CallError) as caught:
        client.call("scale")
    assert caught.value.code is CODE.UNAVAILABLE


# ---- how calls end


def test_an_async_function_is_cancelled_at_the_deadline(serve: Serve, connect: Connect, gate: Gate) -> None:
    with pytest.raises(CallError) as caught:
        connect(serve({"wait": gate.without_end})).call("wait", timeout=0.2)
    assert caught.value.code is CODE.DEADLINE_EXCEEDED
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
    for name in ("gate", "scale"):
        with pytest.raises(CallError) as caught:
            client.call(name, 1.0, timeout=0.2) if name == "scale" else client.call(name, timeout=0.2)
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


# ---- limits


def test_what_is_more_than_a_server_takes_is_refused_at_once(
    serve: Serve, connect: Connect, gate: Gate
) -> None:
    client = connect(serve({"gate": gate}, limits=Limits(in_flight=1, queue=1)))
    with ThreadPoolExecutor() as pool:
        running = pool.submit(client.call, "gate")
        assert gate.entered.acquire(timeout=60)
        others = [pool.submit(client.call, "gate") for _ in range(2)]
        refused = next(each for each in _as_they_fail(others))
        gate.open.set()
        assert refused.code is CODE.RESOURCE_EXHAUSTED
        assert "2 calls run or wait" in refused.text
        assert running.result(60) == "through"


def _as_they_fail(futures: list[Any]) -> Iterator[ServedError]:
    from concurrent.futures import as_completed

    for each in as_completed(futures, timeout=60):
        error = each.exception()
        assert isinstance(error, ServedError)
        yield error


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


@pytest.mark.parametrize("token", [None, "another token......"])
def test_who_has_no_token_is_refused(serve: Serve, connect: Connect, token: str | None) -> None:
    server = serve({"scale": Scale()}, tokens=TOKEN)
    with pytest.raises(CallError) as caught:
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


def test_beyond_this_host_callers_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"whoever reaches 0\.0\.0\.0 could call"):
        farcall.serve({"scale": Scale()}, host="0.0.0.0")


def test_no_token_is_not_an_empty_one() -> None:
    with pytest.raises(ValueError, match="tokens is empty"):
        farcall.serve({"scale": Scale()}, tokens="")


def test_a_taken_port(serve: Serve) -> None:
    port = serve({"scale": Scale()}).port
    with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1:{port}"):
        farcall.serve({"scale": Scale()}, port=port)


# ---- hostile bytes


def test_what_is_malformed_is_the_callers_error_and_the_server_lives_on(
    serve: Serve, connect: Connect
) -> None:
    server = serve({"scale": Scale()})
    call = service_pb2.Invocation(name="scale")
    call.args.add().tensor.MergeFrom(
        value_pb2.Tensor(dtype=value_pb2.DTYPE_FLOAT32, shape=[2, 2], data=bytes(16))
    )
    call.kwargs["shift"].number = 1.0
    genuine = service_pb2.CallRequest(call=call).SerializeToString()
    chance = random.Random(0)
    seen = set()
    with grpc.insecure_channel(f"localhost:{server.port}") as channel:
        methods = [
            channel.unary_unary(f"/farcall.v1.FarcallService/{name}")
            for name in ("Call", "Batch", "Describe")
        ]
        methods.append(channel.unary_unary("/inference.GRPCInferenceService/ModelInfer"))
        for _ in range(500 * EFFORT):
            mutated = bytearray(genuine)
            for _ in range(chance.randint(1, 4)):
                mutated[chance.randrange(len(mutated))] = chance.randrange(256)
            answer = chance.choice(methods).with_call
            try:
                seen.add(answer(bytes(mutated[: chance.randint(1, len(mutated))]), timeout=60)[1].code())
            except grpc.RpcError as error:
                seen.add(error.code())
    assert seen <= {CODE.OK, CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.INTERNAL}
    assert CODE.INVALID_ARGUMENT in seen
    assert float(connect(server).call("scale", 1.0)) == 3.0


def test_a_large_request_that_is_being_read_holds_up_no_other(
    serve: Serve, connect: Connect, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = TorchTensors.decode

    def slowly(tensors: TorchTensors, message: value_pb2.Tensor) -> torch.Tensor:
        gate()
        return decode(tensors, message)

    monkeypatch.setattr(TorchTensors, "decode", slowly)
    server = serve({"scale": Scale(), "count": lambda: 7})
    with ThreadPoolExecutor(1) as threads:
        large = threads.submit(connect(server).call, "scale", np.ones((200, 200), np.float32))
        gate.entered.acquire()
        assert connect(server).call("count") == 7
        gate.open.set()
        assert large.result(60).sum() == 120_000


def test_values_that_are_nested_too_deeply(serve: Serve) -> None:
    server = serve({"scale": Scale()})
    value = b""
    for _ in range(2000):  # a Value with a List with a Value, and so on
        value = b"\x3a" + _length(b"\x0a" + _length(value))
    request = b"\x0a" + _length(b"\x0a\x05scale" + b"\x12" + _length(value))
    with grpc.insecure_channel(f"localhost:{server.port}") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/farcall.v1.FarcallService/Call")(request, timeout=60)
    assert caught.value.code() is CODE.INVALID_ARGUMENT


def _length(data: bytes) -> bytes:
    size, digits = len(data), bytearray()
    while size >= 128:
        digits.append(size & 127 | 128)
        size >>= 7
    return bytes([*digits, size]) + data


# ---- what else is at the port


def test_health_and_reflection(serve: Serve) -> None:
    server = serve({"scale": Scale()}, tokens=TOKEN)
    with grpc.insecure_channel(f"localhost:{server.port}") as channel:
        probe = health_pb2_grpc.HealthStub(channel)  # needs no token
        assert probe.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        named = grpc.intercept_channel(channel, _WithToken())
        listed = ProtoReflectionDescriptorDatabase(named).get_services()
        assert {"farcall.v1.FarcallService", "inference.GRPCInferenceService"} <= set(listed)


class _WithToken(grpc.StreamStreamClientInterceptor):  # type: ignore[misc]  # grpc has no types
    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=[("authorization", f"Bearer {TOKEN}")]), requests)


def test_metrics_and_the_access_log(serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "farcall.access")
    server = serve({"scale": Scale(), "fail": fail}, metrics_port=0, tokens={"ann": TOKEN})
    client = connect(server, token=TOKEN)
    client.call("scale", 1.0)
    with pytest.raises(ServedError):
        client.call("fail", "a\nline")
    with pytest.raises(ServedError):
        client.call("made up")
    server.stop()
    lines = [record.getMessage() for record in caplog.records if record.name == "farcall.access"]
    assert lines[0].startswith("ann scale OK ")
    assert lines[1].startswith("ann fail INTERNAL ")
    assert "\n" not in lines[1]
    assert lines[2].startswith("ann - NOT_FOUND ")


def test_metrics_are_served(serve: Serve, connect: Connect) -> None:
    server = serve({"scale": Scale()}, metrics_port=0)
    connect(server).call("scale", 1.0)
    url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    text = urllib.request.urlopen(url, timeout=60).read().decode()
    assert 'farcall_calls_total{code="OK",name="scale"} 1.0' in text


# ---- what workers have


@in_worker0()
def test_what_is_on_other_workers_is_called_there() -> None:
    served = {"reference": rpc.remote("worker1", Scale), "module": RemoteModule("worker1", Scale)}
    with farcall.serve(served) as server, clients.connect(f"localhost:{server.port}") as client:
        assert float(client.call("reference", 2.0)) == 6.0
        assert float(client.call("module", 2.0, shift=1.0)) == 7.0
        with pytest.raises(ServedError) as caught:
            client.call("module", 2.0, 3.0, 4.0)
        assert caught.value.type == "TypeError"


# ---- clients in other languages


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm here")
def test_a_client_in_javascript(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "client"
    shutil.copytree(
        ROOT / "examples" / "clients" / "node", folder, ignore=shutil.ignore_patterns("node_modules")
    )
    install = [
        "npm",
        "install",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--fetch-retries=0",
        "--fetch-timeout=10000",
    ]
    installed = subprocess.run(install, check=False, cwd=folder, capture_output=True, text=True, timeout=80)
    if installed.returncode:
        pytest.skip(f"npm cannot install gRPC here: {installed.stderr[-300:]}")
    server = serve({"scale": Scale()})

    def ask(name: str, *shape: int) -> subprocess.CompletedProcess[str]:
        command = ["node", "call.js", f"localhost:{server.port}", name, str(list(shape))]
        pixels = np.arange(6, dtype=np.float32).tobytes().decode("latin-1")
        env = {**os.environ, "FARCALL_PROTO": str(ROOT / "proto")}
        options: dict[str, Any] = {"capture_output": True, "encoding": "latin-1", "timeout": 60}
        return subprocess.run(command, check=False, cwd=folder, env=env, input=pixels, **options)

    assert json.loads(ask("scale", 2, 3).stdout) == {"shape": [2, 3], "numbers": [0, 3, 6, 9, 12, 15]}
    assert "NOT_FOUND: nothing is served as 'none'" in ask("none", 2, 3).stderr
    assert "INVALID_ARGUMENT: a tensor float32[7] has 28 bytes, but 24 came" in ask("scale", 7).stderr


# ---- the command


@pytest.mark.processes
def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text("from torch import nn\ndef make_model(): return nn.Identity()\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "farcall", "serve", "made.py:make_model", "--port", "0"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith("serving model at 127.0.0.1:")
    with clients.connect(f"localhost:{first.rpartition(':')[2].strip()}") as client:
        assert client.call("model", np.arange(2)).tolist() == [0, 1]
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "ending: no more calls are taken" in rest
    assert "model OK" in rest


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("made.py", "is not FILE.py:NAME"),
        ("none.py:model", "there is no file none.py"),
        ("farcall_none:model", "there is no module 'farcall_none'"),
        ("made.py:other", "made.py has no 'other'; it has add, nothing, number"),
        ("made.py:add", "missing a required argument: 'a'; to serve the function itself"),
        ("made.py:number", "3 cannot be called"),
        ("made.py:nothing", "it is empty"),
    ],
)
def test_what_cannot_be_served(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    text: str,
) -> None:
    from farcall.cli import main

    (tmp_path / "made.py").write_text("def add(a, b): return a + b\nnothing = {}\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["serve", target]) == 1
    assert text in capsys.readouterr().err

"""``farcall.serve`` and its clients: what is called, what errors say, what else is at the port."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator
from functools import partial
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
from farcall.client import CallError, ServedError
from farcall.serving import Batching, Endpoint, Server, TensorSpec
from rref import RemoteModule
from spmd.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.support.gateway import Connect, Scale, Serve, count, fail
from tests.support.serving import in_worker0
from tests.support.serving import serve as serve_others
from tests.support.workers import RunWorkers, Worker, current_worker

CODE = grpc.StatusCode
TOKEN = "a token of one caller"


def test_functions_and_modules_are_called_with_arrays(serve: Serve, connect: Connect) -> None:
    client = connect(serve({"scale": Scale(), "add": torch.add, "count": count}))
    assert client.call("scale", np.ones((2, 2), np.float32), shift=1.0).tolist() == [[4, 4], [4, 4]]
    assert client.call("add", np.arange(3), 2, alpha=10).tolist() == [20, 21, 22]
    assert list(client.stream("count", 3)) == [0, 1, 2]


def test_what_a_stream_sets_for_its_thread_lasts_from_step_to_step_and_is_no_others(
    serve: Serve, connect: Connect
) -> None:
    def steps() -> Iterator[bool]:
        with torch.no_grad():
            while True:
                yield torch.is_grad_enabled()

    client = connect(serve({"steps": steps, "call": torch.is_grad_enabled}))
    streams = [client.stream("steps") for _ in range(2)]
    for _ in range(3):
        assert [next(each) for each in streams] == [False, False]
        assert client.call("call") is True


def test_a_batch_has_a_result_or_an_error_for_each(serve: Serve, connect: Connect) -> None:
    client = connect(serve({"fail": fail, "scale": Scale()}))
    first, second, third = client.batch(
        [("scale", [2.0]), ("fail", ["no"]), ("scale", [2.0], {"shift": 1.0})]
    )
    assert (float(first), float(third)) == (6.0, 7.0)
    assert isinstance(second, ServedError)
    assert (second.type, second.text, second.code) == ("LookupError", "no", CODE.INTERNAL)


@pytest.mark.parametrize("timeout", [math.inf, 1e20])
def test_a_time_without_an_end(serve: Serve, connect: Connect, timeout: float) -> None:
    assert float(connect(serve({"scale": Scale()})).call("scale", 2.0, timeout=timeout)) == 6.0


def test_calls_in_asyncio(serve: Serve) -> None:
    async def main(server: Server) -> tuple[Any, list[Any], list[Any]]:
        async with clients.connect_async(f"localhost:{server.port}") as client:
            words = [each async for each in client.stream("count", 3)]
            return await client.call("scale", 2.0), words, await client.batch([("scale", [1.0])])

    result, words, several = asyncio.run(main(serve({"scale": Scale(), "count": count})))
    assert (float(result), words, float(several[0])) == (6.0, [0, 1, 2], 3.0)


def test_description(serve: Serve, connect: Connect) -> None:
    rows = TensorSpec("float32", (-1, 2))
    scale = Endpoint(Scale(), inputs={"rows": rows}, batching=Batching())
    client = connect(serve({"scale": scale, "add": partial(torch.add, 1)}))
    added, found = client.describe()
    assert added.doc.startswith("add(input, other"), "that of the function"
    assert (found.name, found.doc, found.batched, found.streams) == ("scale", "Scales rows.", True, False)
    given, shift = found.parameters
    assert (given.name, given.type, list(given.tensor.shape)) == ("rows", "torch.Tensor", [-1, 2])
    assert (shift.name, shift.optional, shift.default_value) == ("shift", True, "0.0")


def test_inputs_that_no_parameter_names_come_by_position_after_those_that_one_does(
    serve: Serve, connect: Connect
) -> None:
    def scale(rows: torch.Tensor, *more: torch.Tensor, by: float = 1.0, **others: torch.Tensor) -> int:
        return 1 + len(more) + len(others)

    inputs = {"mask": TensorSpec("float32", (-1, 2))}
    anything = Endpoint(lambda *args, **kwargs: len(args), inputs=inputs)
    client = connect(serve({"any": anything, "scale": Endpoint(scale, inputs=inputs)}))
    first, second = client.describe()
    assert [(each.name, list(each.tensor.shape)) for each in first.parameters] == [
        ("mask", [-1, 2]),
        ("*args", []),
        ("**kwargs", []),
    ]
    assert [each.name for each in second.parameters] == ["rows", "mask", "*more", "by", "**others"]
    rows, mask = np.ones((1, 3)), np.ones((1, 2), np.float32)
    assert client.call("any", mask) == client.call("scale", rows, by=2.0) == 1
    assert client.call("scale", rows, mask) == client.call("scale", rows, mask=mask) == 2
    refused: list[tuple[str, list[Any], dict[str, Any]]]
    refused = [("any", [rows], {}), ("any", [], {"mask": rows}), ("scale", [rows, rows], {})]
    for name, args, kwargs in refused:
        with pytest.raises(
            ServedError, match=r"mask must be a tensor float32\[-1, 2\], float64\[1, 3\] came"
        ):
            client.call(name, *args, **kwargs)


def test_inputs_that_are_no_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="'images', but the parameters are called 'rows', 'shift'"):
        Endpoint(Scale(), inputs={"images": TensorSpec("float32", (1,))})


@pytest.mark.parametrize(
    ("name", "args", "code", "text"),
    [
        ("nobody", [], CODE.NOT_FOUND, "nothing is served as 'nobody'; there are count, fail, scale"),
        ("scale", [], CODE.INVALID_ARGUMENT, "missing a required argument: 'rows'"),
        ("scale", [1.0], CODE.INVALID_ARGUMENT, "rows must be a tensor float32[-1, 2], float came"),
        (
            "count",
            [3],
            CODE.INVALID_ARGUMENT,
            "'count' is a generator, whose results come one by one: use client.stream()",
        ),
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


@pytest.mark.parametrize(
    "address", ["localhost", ":1", "localhost:", "localhost:65536", "http://localhost:1"]
)
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT, such as localhost:8443"):
        clients.connect(address)


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
    with pytest.raises(CallError):
        connect(server).call("scale", 1.0)
    server.stop()
    lines = [record.getMessage() for record in caplog.records if record.name == "farcall.access"]
    assert lines[0].startswith("ann scale OK ")
    assert lines[1].startswith("ann fail INTERNAL ")
    assert "\n" not in lines[1]
    assert lines[2].startswith("ann - NOT_FOUND ")
    assert re.match(r"ipv[46]:\S+ - UNAUTHENTICATED ", lines[3])


# ---- what workers have


@in_worker0()
def test_what_is_on_other_workers_is_called_there() -> None:
    served = {"reference": rpc.remote("worker1", Scale), "module": RemoteModule("worker1", Scale)}
    assert rpc.serve is farcall.serve
    with rpc.serve(served) as server, clients.connect(f"localhost:{server.port}") as client:
        assert float(client.call("reference", 2.0)) == 6.0
        assert float(client.call("module", 2.0, shift=1.0)) == 7.0
        with pytest.raises(ServedError) as caught:
            client.call("module", 2.0, 3.0, 4.0)
        assert caught.value.type == "TypeError"


def test_what_was_on_a_worker_that_is_lost_is_unavailable_for_good(run_workers: RunWorkers) -> None:
    workers = run_workers.start([call_what_is_lost, serve_others])
    workers[0].wait_for("called")
    workers[1].kill()
    workers[0].tell("killed")
    assert workers[0].result() == [CODE.UNAVAILABLE] * 4


def call_what_is_lost(worker: Worker) -> list[grpc.StatusCode]:
    with worker.group():
        served = {"module": RemoteModule("worker1", Scale), "reference": rpc.remote("worker1", Scale)}
        with farcall.serve(served) as server, clients.connect(f"localhost:{server.port}") as client:
            assert [float(client.call(name, 2.0)) for name in served] == [6.0, 6.0]
            worker.report("called")
            worker.wait_for("killed")
            return [code_of(client, name, 2.0) for name in [*served, *served]]


def code_of(client: clients.Client, name: str, *args: Any) -> grpc.StatusCode:
    with pytest.raises(ServedError) as caught:
        client.call(name, *args, timeout=60)
    return caught.value.code


class Waits:
    """What tells the test that it has begun, and that it was cancelled."""

    async def __call__(self) -> None:
        worker = current_worker()
        worker.report("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            worker.report("cancelled")
            raise


def test_a_call_that_is_given_up_is_cancelled_at_the_worker_where_it_runs(run_workers: RunWorkers) -> None:
    workers = run_workers.start([give_up, serve_others])
    workers[1].wait_for("begun")
    workers[0].tell("give up")
    workers[1].wait_for("cancelled")
    workers.results()


def give_up(worker: Worker) -> None:
    async def call_until_told(port: int) -> None:
        async with clients.connect_async(f"localhost:{port}") as client:
            call = asyncio.create_task(client.call("waits"))
            await asyncio.to_thread(worker.wait_for, "give up")
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    with worker.group(), farcall.serve({"waits": rpc.remote("worker1", Waits)}) as server:
        asyncio.run(call_until_told(server.port))


@in_worker0(3)
def test_a_model_that_is_cut_over_workers_is_served_behind_its_handle() -> None:
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    model = parallelize_module(two_layers, workers=["worker1", "worker2"], parallelize_plan=plan)
    alone = two_layers()
    alone.load_state_dict(model.state_dict())
    rows = torch.ones(2, 4)
    with farcall.serve({"model": model}) as server, clients.connect(f"localhost:{server.port}") as client:
        torch.testing.assert_close(torch.from_numpy(client.call("model", rows.numpy())), alone(rows).detach())
        with pytest.raises(ServedError, match="expected an input whose last dimension is 4"):
            client.call("model", np.ones((2, 5), np.float32))
        assert client.call("model", rows.numpy()).shape == (2, 4)
    model.close()


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

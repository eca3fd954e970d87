"""The open inference protocol, version 2, at the port of ``farcall.serve``."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch

import farcall
from farcall.kserve import inference_pb2 as pb
from farcall.serving import Endpoint, TensorSpec
from tests.support.fresh import RunFresh

Ask = Callable[..., Any]


def halves(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return left / 2, right / 2


def shout(words: list[bytes]) -> list[str]:
    return [word.decode().upper() for word in words]


SERVED = {
    "halves": Endpoint(
        halves,
        inputs={"left": TensorSpec("float32", (-1,)), "right": TensorSpec("float32", (-1,))},
        outputs={"first": TensorSpec("float32", (-1,)), "second": TensorSpec("float32", (-1,))},
    ),
    "shout": shout,
    "listed": lambda x: {"numbers": [1, 2]},
    "named": lambda x: {"double": x * 2, "sum": x.sum()},
}


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Calls a method of the protocol."""
    with farcall.serve(SERVED) as server, grpc.insecure_channel(f"localhost:{server.port}") as channel:

        def call(method: str, **fields: Any) -> Any:
            request, response = getattr(pb, f"{method}Request"), getattr(pb, f"{method}Response")
            stub = channel.unary_unary(
                f"/inference.GRPCInferenceService/{method}", request.SerializeToString, response.FromString
            )
            return stub(request(**fields), timeout=60)

        yield call


@pytest.mark.parametrize(
    "ours", [pytest.param(True, marks=pytest.mark.nightly), False], ids=["farcall first", "farcall last"]
)
def test_other_stubs_of_the_protocol_can_be_in_the_same_process(ours: bool, run_fresh: RunFresh) -> None:
    """The pool is the process's own: stubs of other clients register the same names there."""
    first, second = ("serve()", "register()") if ours else ("register()", "serve()")
    program = f"""
from google.protobuf import descriptor_pb2, descriptor_pool

def register():
    file = descriptor_pb2.FileDescriptorProto(name="grpc_service.proto", package="inference", syntax="proto3")
    for name in ("ServerLiveRequest", "ModelInferRequest"):
        file.message_type.add(name=name)
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())

def serve():
    import farcall, farcall.client
    with farcall.serve({{"add": max}}) as server:
        with farcall.client.connect(f"localhost:{{server.port}}") as client:
            assert client.call("add", 1, 2, timeout=60) == 2

{first}
{second}
"""
    done = run_fresh(program)
    assert (done.returncode, done.stderr) == (0, "")


def given(
    name: str, datatype: str, shape: list[int], **contents: Any
) -> pb.ModelInferRequest.InferInputTensor:
    held = pb.InferTensorContents(**contents) if contents else None
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, contents=held)


def arrays(response: pb.ModelInferResponse) -> dict[str, list[float]]:
    raw = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: np.frombuffer(data, np.float32).tolist() for output, data in raw}


def test_what_the_server_and_a_model_tell_of_themselves(ask: Ask) -> None:
    assert ask("ServerLive").live
    assert ask("ServerReady").ready
    assert ask("ModelReady", name="halves").ready
    assert not ask("ModelReady", name="none").ready
    assert ask("ServerMetadata").name == "farcall"
    model = ask("ModelMetadata", name="halves")
    assert [(each.name, each.datatype, list(each.shape)) for each in model.inputs] == [
        ("left", "FP32", [-1]),
        ("right", "FP32", [-1]),
    ]
    assert [each.name for each in model.outputs] == ["first", "second"]


def test_raw_inputs_go_to_the_parameters_of_their_names(ask: Ask) -> None:
    response = ask(
        "ModelInfer",
        model_name="halves",
        id="7",
        inputs=[given("right", "FP32", [1]), given("left", "FP32", [2])],
        raw_input_contents=[np.array([2], np.float32).tobytes(), np.array([4, 6], np.float32).tobytes()],
    )
    assert response.id == "7"
    assert arrays(response) == {"first": [2.0, 3.0], "second": [1.0]}


def test_contents_that_are_not_raw_and_inputs_by_position(ask: Ask) -> None:
    inputs = [given("a", "FP32", [1], fp32_contents=[2.0]), given("b", "FP32", [1], fp32_contents=[4.0])]
    assert arrays(ask("ModelInfer", model_name="halves", inputs=inputs)) == {"first": [1.0], "second": [2.0]}


def test_only_the_outputs_that_are_asked_for_come(ask: Ask) -> None:
    inputs = [given("x", "FP32", [2], fp32_contents=[1.0, 2.0])]
    wanted = [pb.ModelInferRequest.InferRequestedOutputTensor(name="sum")]
    assert arrays(ask("ModelInfer", model_name="named", inputs=inputs, outputs=wanted)) == {"sum": [3.0]}


@pytest.mark.parametrize("raw", [False, True])
def test_strings(ask: Ask, raw: bool) -> None:
    words = [b"one", b"", b"three"]
    packed = b"".join(struct.pack("<I", len(word)) + word for word in words)
    response = ask(
        "ModelInfer",
        model_name="shout",
        inputs=[given("words", "BYTES", [3], **({} if raw else {"bytes_contents": words}))],
        raw_input_contents=[packed] if raw else [],
    )
    assert response.outputs[0].datatype == "BYTES"
    assert response.raw_output_contents[0] == packed.upper()


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "UINT16", "INT64", "FP16", "BF16", "FP64"])
def test_datatypes_come_back_as_they_went(ask: Ask, datatype: str) -> None:
    sizes = {"BOOL": 1, "INT8": 1, "UINT16": 2, "INT64": 8, "FP16": 2, "BF16": 2, "FP64": 8}
    response = ask(
        "ModelInfer",
        model_name="named",
        inputs=[given("x", datatype, [2])],
        raw_input_contents=[bytes(2 * sizes[datatype])],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="double")],
    )
    assert response.outputs[0].datatype == ("INT64" if datatype == "BOOL" else datatype)
    assert not any(response.raw_output_contents[0])


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"model_name": "none"}, "NOT_FOUND", "nothing is served as 'none'"),
        (
            {"model_name": "listed", "inputs": [given("x", "FP32", [0])]},
            "INTERNAL",
            "of type list is no tensor",
        ),
        ({"inputs": [given("x", "FP31", [1])]}, "INVALID_ARGUMENT", "the datatype 'FP31'"),
        ({"inputs": [given("x", "FP32", [-1])]}, "INVALID_ARGUMENT", "shape [-1]"),
        (
            {"inputs": [given("x", "FP32", [3])], "raw_input_contents": [b"1234"]},
            "INVALID_ARGUMENT",
            "has 12 bytes, but 4 came",
        ),
        (
            {"inputs": [given("x", "FP32", [1])], "raw_input_contents": [b"1234", b""]},
            "INVALID_ARGUMENT",
            "1 inputs, but 2 raw contents",
        ),
        (
            {"inputs": [given("x", "INT8", [1], int_contents=[1000])]},
            "INVALID_ARGUMENT",
            "elements that INT8 cannot hold",
        ),
        (
            {"inputs": [given("x", "BYTES", [1])], "raw_input_contents": [b"\xff\xff\xff\xff1"]},
            "INVALID_ARGUMENT",
            "ends after its raw contents",
        ),
        (
            {"inputs": [given("x", "FP16", [1], fp32_contents=[1.0])]},
            "INVALID_ARGUMENT",
            "whose contents must be raw",
        ),
    ],
)
def test_errors(ask: Ask, fields: dict[str, Any], code: str, text: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask("ModelInfer", **{"model_name": "named", **fields})
    assert caught.value.code().name == code
    assert text in caught.value.details()

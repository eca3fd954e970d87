"""The open inference protocol, version 2, for the same endpoints: for existing clients.

An input is passed to the parameter with its name; if no parameter has the name of an input, inputs are passed
by position. Results are named by the endpoint's ``outputs``, by the keys of a dict, or ``output0``,
``output1`` and so on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import count
from math import prod
from typing import Any, Final

import grpc
import numpy as np
import torch

import farcall
from farcall.grpc.values import Malformed, byte_count, shape_of
from farcall.kserve import inference_pb2 as pb
from farcall.serving.calls import Caller, Calls, beside_the_loop, parse, size_of
from farcall.serving.endpoint import Endpoint, TensorSpec
from farcall.serving.errors import Unknown
from farcall.serving.host import Host
from farcall.serving.tensors import TorchTensors

__all__ = ["handlers", "probes"]

SERVICE: Final = "inference.GRPCInferenceService"

_TENSORS: Final = TorchTensors()

_DTYPES: Final = {
    "BOOL": "bool",
    **{f"UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BF16": "bfloat16",
}
_DATATYPES: Final = {name: datatype for datatype, name in _DTYPES.items()}
_BYTES: Final = "BYTES"

_CONTENTS: Final = {
    "BOOL": "bool_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    _BYTES: "bytes_contents",
}
"""Fields with a tensor's elements if they are not raw."""


def handlers(host: Host, calls: Calls) -> Any:
    """Return the methods of the service, for a gRPC server."""
    service = _Service(host)
    methods = {
        "ServerLive": service.server_live,
        "ServerReady": service.server_ready,
        "ModelReady": service.model_ready,
        "ServerMetadata": service.server_metadata,
        "ModelMetadata": service.model_metadata,
        "ModelInfer": service.infer,
    }
    return grpc.method_handlers_generic_handler(
        SERVICE, {name: calls.unary(answer) for name, answer in methods.items()}
    )


def probes(host: Host) -> dict[str, Any]:
    """Return handlers for the methods that need no token, by their full names, which read no request."""

    async def live(_: Any, context: Any) -> None:
        await context.write(pb.ServerLiveResponse(live=True).SerializeToString())

    async def ready(_: Any, context: Any) -> None:
        await context.write(pb.ServerReadyResponse(ready=not host.admission.draining).SerializeToString())

    answers = {"ServerLive": live, "ServerReady": ready}
    return {
        f"/{SERVICE}/{name}": grpc.stream_stream_rpc_method_handler(each) for name, each in answers.items()
    }


class _Service:
    def __init__(self, host: Host) -> None:
        self._host = host

    async def server_live(self, request: bytes, _: Caller) -> pb.ServerLiveResponse:
        parse(pb.ServerLiveRequest, request, self._host.request_bytes)
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, request: bytes, _: Caller) -> pb.ServerReadyResponse:
        parse(pb.ServerReadyRequest, request, self._host.request_bytes)
        return pb.ServerReadyResponse(ready=not self._host.admission.draining)

    async def model_ready(self, request: bytes, _: Caller) -> pb.ModelReadyResponse:
        name = parse(pb.ModelReadyRequest, request, self._host.request_bytes).name
        return pb.ModelReadyResponse(ready=name in self._host.endpoints and not self._host.admission.draining)

    async def server_metadata(self, request: bytes, _: Caller) -> pb.ServerMetadataResponse:
        parse(pb.ServerMetadataRequest, request, self._host.request_bytes)
        return pb.ServerMetadataResponse(name="farcall", version=farcall.__version__)

    async def model_metadata(self, request: bytes, _: Caller) -> pb.ModelMetadataResponse:
        name = parse(pb.ModelMetadataRequest, request, self._host.request_bytes).name
        endpoint = self._host.find(name)
        return pb.ModelMetadataResponse(
            name=name,
            versions=["1"],
            platform="farcall",
            inputs=[_metadata(each, spec) for each, spec in endpoint.inputs.items()],
            outputs=[_metadata(each, spec) for each, spec in endpoint.outputs.items()],
        )

    async def infer(self, request: bytes, caller: Caller) -> pb.ModelInferResponse:
        message = await beside_the_loop(
            len(request), parse, pb.ModelInferRequest, request, self._host.request_bytes
        )
        caller.served = message.model_name
        endpoint = self._host.find(message.model_name, streams=False)
        inputs = await beside_the_loop(len(request), _inputs, message)
        names = endpoint.signature.parameters if endpoint.signature else endpoint.inputs
        by_name = any(name in names for name in inputs)
        args, kwargs = ([], inputs) if by_name else (list(inputs.values()), {})
        result = await self._host.call(
            message.model_name, args, kwargs, caller=caller.name, seconds=caller.seconds
        )
        return await beside_the_loop(size_of(result), _response, message, endpoint, result)


def _metadata(name: str, spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    datatype = _DATATYPES.get(spec.dtype_name, spec.dtype_name.upper())
    return pb.ModelMetadataResponse.TensorMetadata(name=name, datatype=datatype, shape=spec.shape)


# ---- requests


def _inputs(message: pb.ModelInferRequest) -> dict[str, Any]:
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise Malformed(f"{len(message.inputs)} inputs, but {len(raw)} raw contents")
    inputs: dict[str, Any] = {}
    for index, each in enumerate(message.inputs):
        if each.name in inputs:
            raise Malformed(f"two inputs have the name {each.name!r}")
        inputs[each.name] = _input(each, raw[index] if raw else None)
    return inputs


def _input(message: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Any:
    datatype, shape = message.datatype, shape_of(message.shape)
    if datatype != _BYTES and datatype not in _DTYPES:
        raise Malformed(f"input {message.name!r} has the datatype {datatype!r}, which is not known here")
    if any(size < 0 for size in shape):
        raise Malformed(f"input {message.name!r} has the shape {list(shape)}; sizes are 0 or more")
    try:
        size = byte_count(_DTYPES.get(datatype, "uint8"), shape)
    except Malformed as error:
        raise Malformed(f"input {message.name!r}: {error}") from None
    if raw is None:
        if datatype not in _CONTENTS:
            raise Malformed(f"input {message.name!r} is {datatype}, whose contents must be raw")
        elements: Any = getattr(message.contents, _CONTENTS[datatype])
    elif datatype == _BYTES:
        elements = list(_strings(message.name, raw))
    else:
        name = _DTYPES[datatype]
        _fits(message.name, f"{datatype}{shape}", size, len(raw), "bytes")
        return _TENSORS.decode(name, shape, raw)
    _fits(message.name, f"{datatype}{shape}", prod(shape), len(elements), "elements")
    if datatype == _BYTES:
        return list(elements)
    try:
        array = np.fromiter(elements, _DTYPES[datatype], len(elements))
    except OverflowError as error:
        raise Malformed(f"input {message.name!r} has elements that {datatype} cannot hold: {error}") from None
    return torch.from_numpy(array).reshape(shape)


def _fits(name: str, what: str, expected: int, came: int, unit: str) -> None:
    if expected != came:
        raise Malformed(f"input {name!r}, {what}, has {expected} {unit}, but {came} came")


def _strings(name: str, raw: bytes) -> Iterator[bytes]:
    """Elements of BYTES: each its length in four bytes, little-endian, and itself."""
    at = 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at) if at + 4 <= len(raw) else (len(raw),)
        at += 4
        if at + length > len(raw):
            raise Malformed(f"input {name!r} has an element that ends after its raw contents")
        yield raw[at : at + length]
        at += length


# ---- answers


def _response(message: pb.ModelInferRequest, endpoint: Endpoint, result: Any) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(
        model_name=message.model_name, model_version=message.model_version or "1", id=message.id
    )
    results = dict(_named(endpoint, result))
    wanted = [each.name for each in message.outputs] or list(results)
    for name in wanted:
        if name not in results:
            raise Unknown(f"there is no output {name!r}; there are {', '.join(results)}")
        datatype, shape, raw = _output(results[name])
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(raw)
    return response


def _named(endpoint: Endpoint, result: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(result, dict):
        yield from result.items()
        return
    several = isinstance(result, (list, tuple)) and not all(isinstance(each, (str, bytes)) for each in result)
    names = iter(endpoint.outputs)
    for index, each in zip(count(), result if several else [result], strict=False):
        yield next(names, f"output{index}"), each


def _output(value: Any) -> tuple[str, list[int], bytes]:
    if isinstance(value, (str, bytes)):
        return _BYTES, [1], _packed([value])
    if isinstance(value, (list, tuple)) and all(isinstance(each, (str, bytes)) for each in value):
        return _BYTES, [len(value)], _packed(value)
    elements = _TENSORS.encode(torch.tensor(value) if isinstance(value, (bool, int, float)) else value)
    if elements is None:
        raise TypeError(
            f"a result of type {type(value).__qualname__} is no tensor, which this protocol needs"
        )
    name, shape, data = elements
    if name not in _DATATYPES:
        raise TypeError(f"a result is {name}, which this protocol does not have")
    return _DATATYPES[name], list(shape), data


def _packed(strings: Any) -> bytes:
    encoded = [each.encode() if isinstance(each, str) else each for each in strings]
    return b"".join(struct.pack("<I", len(each)) + each for each in encoded)

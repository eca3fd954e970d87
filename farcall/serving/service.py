"""``farcall.v1.FarcallService``, for clients in any language."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

import farcall
from farcall.grpc.values import Malformed, dtype_number, from_value, to_value
from farcall.serving.calls import Caller, Calls, beside_the_loop, parse, size_of
from farcall.serving.endpoint import Endpoint, TensorSpec
from farcall.serving.errors import details_of
from farcall.serving.host import Host
from farcall.serving.tensors import TorchTensors
from farcall.v1 import service_pb2 as pb
from farcall.v1 import value_pb2

__all__ = ["handlers"]

SERVICE: Final = "farcall.v1.FarcallService"

_STARS: Final[dict[object, str]] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}

_TENSORS: Final = TorchTensors()


def handlers(host: Host, calls: Calls) -> Any:
    """The methods of the service, for a gRPC server."""
    service = _Service(host, calls.tracebacks)
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Describe": calls.unary(service.describe),
            "Call": calls.unary(service.call),
            "StreamCall": calls.streaming(service.stream),
            "Batch": calls.unary(service.batch),
        },
    )


class _Service:
    def __init__(self, host: Host, tracebacks: bool) -> None:
        self._host = host
        self._tracebacks = tracebacks

    async def describe(self, request: bytes, _: Caller) -> pb.DescribeResponse:
        name = parse(pb.DescribeRequest, request, self._host.request_bytes).name
        found = {name: self._host.find(name)} if name else self._host.endpoints
        served = [_described(each, endpoint) for each, endpoint in sorted(found.items())]
        return pb.DescribeResponse(served=served, version=farcall.__version__)

    async def call(self, request: bytes, caller: Caller) -> pb.CallResponse:
        response = pb.CallResponse()
        name, args, kwargs = await self._read(pb.CallRequest, request, caller)
        await self._put_result(response.value, name, args, kwargs, caller)
        return response

    async def stream(self, request: bytes, caller: Caller) -> AsyncIterator[pb.StreamCallResponse]:
        name, args, kwargs = await self._read(pb.StreamCallRequest, request, caller)
        results = self._host.stream(name, args, kwargs, caller=caller.name, seconds=caller.seconds)
        try:
            async for each in results:
                response = pb.StreamCallResponse()
                await _put(response.value, each)
                yield response
        finally:
            await results.aclose()  # type: ignore[attr-defined]

    async def batch(self, request: bytes, caller: Caller) -> pb.BatchResponse:
        message = await beside_the_loop(
            len(request), parse, pb.BatchRequest, request, self._host.request_bytes
        )
        invocations = message.calls
        self._host.admission.check_together(len(invocations))
        names = {each.name for each in invocations}
        caller.served = names.pop() if len(names) == 1 else caller.served
        response = pb.BatchResponse()
        await asyncio.gather(
            *(self._put_outcome(response.results.add(), each, len(request), caller) for each in invocations)
        )
        return response

    async def _read(
        self, kind: type[pb.CallRequest | pb.StreamCallRequest], request: bytes, caller: Caller
    ) -> tuple[str, list[Any], dict[str, Any]]:
        return await beside_the_loop(len(request), _read, kind, request, self._host.request_bytes, caller)

    async def _put_outcome(
        self, into: pb.Result, invocation: pb.Invocation, size: int, caller: Caller
    ) -> None:
        try:
            args, kwargs = await beside_the_loop(size, _arguments, invocation)
            await self._put_result(into.value, invocation.name, args, kwargs, caller)
        except Exception as error:
            into.error.CopyFrom(details_of(error, tracebacks=self._tracebacks))

    async def _put_result(
        self, into: value_pb2.Value, name: str, args: list[Any], kwargs: dict[str, Any], caller: Caller
    ) -> None:
        result = await self._host.call(name, args, kwargs, caller=caller.name, seconds=caller.seconds)
        await _put(into, result)


async def _put(into: value_pb2.Value, result: Any) -> None:
    await beside_the_loop(size_of(result), to_value, result, _TENSORS, into)


def _read(
    kind: type[pb.CallRequest | pb.StreamCallRequest], request: bytes, limit: int, caller: Caller
) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the endpoint's name, and the arguments."""
    invocation = parse(kind, request, limit).call
    caller.served = invocation.name
    return invocation.name, *_arguments(invocation)


def _arguments(invocation: pb.Invocation) -> tuple[list[Any], dict[str, Any]]:
    if not invocation.name:
        raise Malformed("the call has no name")
    args = [from_value(each, _TENSORS) for each in invocation.args]
    kwargs = {name: from_value(each, _TENSORS) for name, each in invocation.kwargs.items()}
    return args, kwargs


def _described(name: str, endpoint: Endpoint) -> pb.Description:
    seen = {} if endpoint.signature is None else endpoint.signature.parameters
    names = [*endpoint.order, *(each for each in seen if each not in endpoint.order)]
    parameters = [_parameter(seen[each]) if each in seen else pb.Parameter(name=each) for each in names]
    for parameter in parameters:
        if parameter.name in endpoint.inputs:
            parameter.tensor.CopyFrom(_spec(endpoint.inputs[parameter.name]))
    outputs = [pb.Output(name=each, tensor=_spec(spec)) for each, spec in endpoint.outputs.items()]
    return pb.Description(
        name=name,
        doc=endpoint.text,
        parameters=parameters,
        outputs=outputs,
        streams=endpoint.streams,
        batched=endpoint.batching is not None,
    )


def _parameter(parameter: inspect.Parameter) -> pb.Parameter:
    empty = inspect.Parameter.empty
    kind = "" if parameter.annotation is empty else inspect.formatannotation(parameter.annotation).strip("'")
    default = "" if parameter.default is empty else repr(parameter.default)
    optional = parameter.default is not empty or parameter.kind in _STARS
    name = _STARS.get(parameter.kind, "") + parameter.name
    return pb.Parameter(name=name, type=kind, optional=optional, default_value=default)


def _spec(spec: TensorSpec) -> pb.TensorSpec:
    return pb.TensorSpec(dtype=dtype_number(spec.dtype_name), shape=spec.shape)

"""Mutated requests to ``farcall.serve``, on both of its protocols.

::

    python -m tests.fuzz.gateway --messages 10000
    python -m tests.fuzz.gateway --messages 1000 --seed 7

The server is a process of its own. Each message is a genuine request with some bytes changed, left out,
repeated or taken from another. It fails if one is answered by anything but ``INVALID_ARGUMENT`` or what the
request, as the schema reads it, deserves: ``NOT_FOUND`` for another name, ``RESOURCE_EXHAUSTED`` for too many
calls, a result where what is served takes the arguments. In between and in the end the server must answer
a genuine call, and its memory must not have grown. Messages that fail are printed; the seed finds them again.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import grpc
import torch
from google.protobuf.message import DecodeError, Message

import farcall
from farcall.client import Client
from farcall.client.arrays import NumpyTensors
from farcall.grpc.values import Malformed, from_value, to_value
from farcall.kserve import inference_pb2
from farcall.v1 import service_pb2, value_pb2
from tests.fuzz.hostile.mutation import Mutator
from tests.support.gateway import memory_mib, with_server

__all__ = ["SERVED", "attack", "main"]

_SERVICE: Final = "/farcall.v1.FarcallService/"
_INFERENCE: Final = "/inference.GRPCInferenceService/"
_PATIENCE: Final = 20.0
"""Seconds for one answer."""

_LOOK: Final = 500
"""Messages between looks at the server."""

_MEMORY_MIB: Final = 64.0
"""By so much may the server grow; no message has more than 64 KiB."""

_CODE = grpc.StatusCode
Genuine = tuple[str, type[Message], bytes]


# ---- the server


def echo(*args: Any, **kwargs: Any) -> list[Any]:
    """What came: whatever can be read has an answer."""
    return [*args, kwargs]


def each(*args: Any) -> Any:
    """The arguments, one after the other."""
    yield from args


def infer(*args: Any) -> torch.Tensor:
    """A tensor, as the open protocol needs one, whatever came."""
    return torch.zeros(2)


def _serve(connection: Connection) -> None:
    with farcall.serve(SERVED) as server:
        connection.send(server.port)
        connection.recv()


SERVED: Final = {function.__name__: function for function in (echo, each, infer)}


# ---- what is sent


def _values() -> list[value_pb2.Value]:
    tensor = value_pb2.Tensor(dtype=value_pb2.DTYPE_FLOAT32, shape=[2, 2], data=bytes(16))
    some = [
        value_pb2.Value(null=value_pb2.Null()),
        value_pb2.Value(boolean=True),
        value_pb2.Value(integer=-7),
        value_pb2.Value(number=0.5),
        value_pb2.Value(text="a text \u00e9"),
        value_pb2.Value(binary=b"\0\xff"),
        value_pb2.Value(tensor=tensor),
        value_pb2.Value(tensor=value_pb2.Tensor(dtype=value_pb2.DTYPE_BFLOAT16, shape=[0, 3])),
    ]
    deep = value_pb2.Value(list=value_pb2.List(items=some))
    for _ in range(20):
        deep = value_pb2.Value(list=value_pb2.List(items=[deep]))
    return [*some, deep, value_pb2.Value(map=value_pb2.Map(items={"a": some[3], "b": deep}))]


def _genuine() -> list[Genuine]:
    """Requests that are right, with where they go and what they are."""
    values = _values()
    calls = [service_pb2.Invocation(name=name, args=values) for name in ("echo", "each")]
    calls[0].kwargs["more"].CopyFrom(values[-1])
    small = [service_pb2.Invocation(name="echo", args=[value]) for value in values]
    requests: list[tuple[str, Message]] = [
        *((f"{_SERVICE}Call", service_pb2.CallRequest(call=call)) for call in [calls[0], *small]),
        (f"{_SERVICE}StreamCall", service_pb2.StreamCallRequest(call=calls[1])),
        (f"{_SERVICE}Batch", service_pb2.BatchRequest(calls=[calls[0], *small])),
        (f"{_SERVICE}Describe", service_pb2.DescribeRequest(name="echo")),
        *((f"{_INFERENCE}ModelInfer", request) for request in _inferences()),
        (f"{_INFERENCE}ModelMetadata", inference_pb2.ModelMetadataRequest(name="echo")),
    ]
    return [(method, type(request), request.SerializeToString()) for method, request in requests]


def _inferences() -> list[inference_pb2.ModelInferRequest]:
    request = inference_pb2.ModelInferRequest
    given = request.InferInputTensor(name="x", datatype="FP32", shape=[2, 3])
    raw = request(model_name="infer", id="1", inputs=[given], raw_input_contents=[bytes(24)])
    named = request(model_name="infer", inputs=[given])
    named.inputs[0].contents.fp32_contents.extend([0.5] * 6)
    texts = request.InferInputTensor(name="t", datatype="BYTES", shape=[2])
    texts.contents.bytes_contents.extend([b"a", b"\xff"])
    written = request.InferInputTensor(name="t", datatype="BYTES", shape=[1])
    parts = request(model_name="infer", inputs=[written], raw_input_contents=[b"\3\0\0\0abc"])
    return [raw, named, request(model_name="infer", inputs=[texts]), parts]


# ---- what comes


def _names(request: Message) -> set[str]:
    """What a request wants called or described."""
    if isinstance(request, service_pb2.BatchRequest):
        return {call.name for call in request.calls}
    if isinstance(request, service_pb2.CallRequest | service_pb2.StreamCallRequest):
        return {request.call.name}
    name: str = getattr(request, "model_name", "") or getattr(request, "name", "")
    return {name}


def _echoed(call: service_pb2.Invocation) -> bytes | None:
    """What ``echo`` answers to a call, as a client's NumPy reads it; None: its arguments are malformed."""
    tensors = NumpyTensors()
    try:
        args = [from_value(each, tensors) for each in call.args]
        kwargs = {name: from_value(each, tensors) for name, each in call.kwargs.items()}
    except Malformed:
        return None
    return to_value([*args, kwargs], tensors).SerializeToString(deterministic=True)


def _wrong(kind: type[Message], data: bytes, code: grpc.StatusCode, text: str, answer: bytes) -> str:
    """Why an answer is not what a request deserves; empty if it is."""
    try:
        request = kind.FromString(data)
    except (DecodeError, UnicodeDecodeError):
        return "" if code is _CODE.INVALID_ARGUMENT else "it cannot be read"
    if isinstance(request, service_pb2.CallRequest) and request.call.name == "echo":
        expected = _echoed(request.call)
        if expected is None:
            return "" if code is _CODE.INVALID_ARGUMENT else "its arguments are malformed"
        if code is not _CODE.OK:
            return f"it can be read: {text}"
        value = service_pb2.CallResponse.FromString(answer).value
        return "" if value.SerializeToString(deterministic=True) == expected else "another result"
    match code:
        case _CODE.OK | _CODE.INVALID_ARGUMENT:
            return ""
        case _CODE.NOT_FOUND:
            return "" if _names(request) - SERVED.keys() else "what it names is served"
        case _CODE.INTERNAL if kind is inference_pb2.ModelInferRequest and _names(request) == {"echo"}:
            return ""  # its result is no tensor
        case _CODE.RESOURCE_EXHAUSTED:
            return "" if len(getattr(request, "calls", ())) > 256 else "it asks for little"
    return f"nothing asks for this: {text}"


def _replaced(data: bytes, chance: random.Random) -> bytes:
    """With a byte or two replaced, so that lengths mostly stay right and what is changed is read."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2))):
        changed[chance.randrange(len(changed))] = chance.choice(
            (0, 1, 2, 8, 127, 128, 255, chance.randrange(256))
        )
    return bytes(changed)


class _Peer:
    """Sends messages and judges the answers.

    Args:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._client = Client(self._channel, None)
        self.codes: Counter[str] = Counter()

    def send(self, method: str, kind: type[Message], data: bytes) -> str:
        """What is wrong with the answer."""
        code, text, answer = self.ask(method, data)
        self.codes[code.name] += 1
        return _wrong(kind, data, code, text, answer)

    def ask(self, method: str, data: bytes) -> tuple[grpc.StatusCode, str, bytes]:
        """The code, the text and, of one that is no stream, the bytes of an answer."""
        answer = b""
        try:
            if method.endswith("StreamCall"):
                list(self._channel.unary_stream(method)(data, timeout=_PATIENCE))
            else:
                answer = self._channel.unary_unary(method)(data, timeout=_PATIENCE)
        except grpc.RpcError as error:
            return error.code(), error.details() or "", b""
        return _CODE.OK, "", answer

    def alive(self) -> str:
        """What is wrong with the server, as a genuine call sees it."""
        result = self._client.call("echo", 7, timeout=_PATIENCE)
        return "" if result == [7, {}] else f"a genuine call has the result {result!r}"

    def close(self) -> None:
        """End the connection."""
        self._client.close()


def attack(port: int, pid: int, count: int, seed: int) -> list[str]:
    """Send messages to the server of a process; prints what happens, and returns what is wrong."""
    peer, mutator, chance = _Peer(port), Mutator(seed), random.Random(seed)
    genuine, wrong = _genuine(), []
    pool = [data for _, _, data in genuine]
    for method, _, data in genuine:
        code, text, _ = peer.ask(method, data)
        assert code is _CODE.OK, f"a genuine request to {method} is answered {code}: {text}"
    before = memory_mib(pid)
    for number in range(1, count + 1):
        method, kind, data = chance.choice(genuine)
        mutated = mutator.of_bytes(data, pool) if chance.random() < 0.5 else _replaced(data, chance)
        what = peer.send(method, kind, mutated)
        if what:
            wrong.append(f"message {number} to {method}: {what}\n    {mutated[:300]!r}")
        if number % _LOOK == 0 or number == count:
            if what := peer.alive():
                wrong.append(f"after message {number}: {what}")
            if number % (10 * _LOOK) == 0 or number == count:
                print(f"{number:7} messages: {dict(peer.codes)}; {memory_mib(pid):.0f} MiB", flush=True)
    peer.close()
    after = memory_mib(pid)
    if after - before > _MEMORY_MIB:
        wrong.append(f"the server has grown from {before:.0f} to {after:.0f} MiB")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.fuzz.gateway", description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000, help="how many (default: 10000)")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="of what is mutated (default: the time)"
    )
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    return with_server(_serve, lambda server: attack(server.port, server.pid, options.messages, options.seed))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

"""How much memory a request takes is known before it is parsed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from farcall.kserve import inference_pb2
from farcall.serving.errors import Refused
from farcall.serving.memory import check_memory
from farcall.v1 import service_pb2, value_pb2

LIMIT = 1 << 20
DESCRIPTOR = service_pb2.CallRequest.DESCRIPTOR


def call_with(value: value_pb2.Value) -> bytes:
    request = service_pb2.CallRequest(call=service_pb2.Invocation(name="f"))
    request.call.args.add().CopyFrom(value)
    return request.SerializeToString()


def is_refused(request: bytes, descriptor: Any = DESCRIPTOR) -> bool:
    try:
        check_memory(descriptor, request, LIMIT)
    except Refused:
        return True
    return False


def nulls(count: int) -> value_pb2.Value:
    null = value_pb2.Value(null=value_pb2.Null())
    return value_pb2.Value(list=value_pb2.List(items=[null] * count))


def without_kind(count: int) -> value_pb2.Value:
    return value_pb2.Value(list=value_pb2.List(items=[value_pb2.Value()] * count))


def nested(count: int) -> value_pb2.Value:
    return value_pb2.Value(list=value_pb2.List(items=[nulls(10)] * (count // 10)))


def entries(count: int) -> value_pb2.Value:
    value = value_pb2.Value()
    for each in range(count):
        value.map.items[str(each)].integer = each
    return value


def dimensions(count: int) -> value_pb2.Value:
    return value_pb2.Value(tensor=value_pb2.Tensor(shape=[1] * count))


@pytest.mark.parametrize("made", [nulls, entries, nested, without_kind, dimensions])
def test_many_small_values_are_refused(made: Any) -> None:
    assert is_refused(call_with(made(200_000)))
    assert not is_refused(call_with(made(2_000)))


def test_what_is_large_in_one_piece_passes() -> None:
    size = 10 * LIMIT
    tensor = value_pb2.Tensor(dtype=value_pb2.DTYPE_UINT8, shape=[size], data=bytes(size))
    for large in ({"binary": bytes(size)}, {"text": "x" * size}, {"tensor": tensor}):
        assert not is_refused(call_with(value_pb2.Value(**large)))


def test_many_values_in_named_arguments_and_batches_are_refused() -> None:
    request = service_pb2.BatchRequest()
    for _ in range(10):
        request.calls.add().kwargs["x"].CopyFrom(nulls(10_000))
    assert is_refused(request.SerializeToString(), service_pb2.BatchRequest.DESCRIPTOR)


def test_contents_of_the_open_protocol() -> None:
    def request(**contents: Any) -> bytes:
        made = inference_pb2.ModelInferRequest(model_name="f")
        made.inputs.add(name="x", datatype="INT64", shape=[1]).contents.MergeFrom(
            inference_pb2.InferTensorContents(**contents)
        )
        return made.SerializeToString()

    descriptor = inference_pb2.ModelInferRequest.DESCRIPTOR
    assert not is_refused(request(fp32_contents=[1.0] * 100_000), descriptor)
    assert is_refused(request(int64_contents=[1] * 100_000), descriptor)
    assert is_refused(request(bytes_contents=[b""] * 60_000), descriptor)


def test_values_behind_unknown_fields_and_groups_are_counted() -> None:
    many = call_with(nulls(60_000))
    for before in (
        b"\xf8\x07\x01",
        b"\xfb\x07\x08\x01\xfc\x07",
        b"\xfd\x07abcd",
        b"\xf9\x07abcdefgh",
        b"\xfa\x07\x01x",
    ):
        request = before + many
        assert service_pb2.CallRequest.FromString(request).call.name == "f"  # the parser takes it
        assert is_refused(request)


def test_no_bytes_make_it_fail() -> None:
    chance = random.Random(0)
    genuine = call_with(entries(10_000))
    for _ in range(50):
        mutated = bytearray(genuine)
        for _ in range(chance.randint(1, 1000)):
            mutated[chance.randrange(len(mutated))] = chance.randrange(256)
        is_refused(bytes(mutated[: chance.randint(1 << 16, len(mutated))]))
    is_refused(bytes([0xFF]) * (1 << 17))
    is_refused(bytes(1 << 17))

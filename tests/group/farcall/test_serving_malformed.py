"""Requests to ``farcall.serve`` that are malformed, large, or nested deeply."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from farcall.grpc.values import Elements
from farcall.serving.tensors import TorchTensors
from tests.fuzz import gateway
from tests.support.effort import EFFORT
from tests.support.gateway import Connect, Gate, Scale, Serve

CODE = grpc.StatusCode


def test_mutated_requests_get_the_answers_that_they_deserve_and_the_server_lives_on(serve: Serve) -> None:
    assert gateway.attack(serve(gateway.SERVED).port, os.getpid(), 500 * EFFORT, seed=0) == []


def test_a_large_request_that_is_being_read_holds_up_no_other(
    serve: Serve, connect: Connect, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = TorchTensors.decode

    def slowly(tensors: TorchTensors, name: str, shape: Sequence[int], data: bytes) -> torch.Tensor:
        gate()
        return decode(tensors, name, shape, data)

    monkeypatch.setattr(TorchTensors, "decode", slowly)
    server = serve({"scale": Scale(), "count": lambda: 7})
    with ThreadPoolExecutor(1) as threads:
        large = threads.submit(connect(server).call, "scale", np.ones((200, 200), np.float32))
        assert gate.entered.acquire(timeout=60)
        assert connect(server).call("count") == 7
        gate.open.set()
        assert large.result(60).sum() == 120_000


@pytest.mark.parametrize(
    "value",
    [
        [[[torch.ones(200, 200)]]],
        {"a": {"b": torch.ones(200, 200)}},
        [[torch.ones(1)] * 40] * 120,
        [["x" * 100_000, torch.ones(1)]],
    ],
    ids=["nested", "in maps", "many", "text"],
)
def test_a_large_result_that_is_being_written_holds_up_no_other(
    serve: Serve, connect: Connect, gate: Gate, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    encode = TorchTensors.encode

    def slowly(tensors: TorchTensors, value: object) -> Elements | None:
        gate()
        return encode(tensors, value)

    monkeypatch.setattr(TorchTensors, "encode", slowly)
    server = serve({"large": lambda: value, "count": lambda: 7})
    with ThreadPoolExecutor(1) as threads:
        large = threads.submit(connect(server).call, "large")
        assert gate.entered.acquire(timeout=60)
        try:
            assert connect(server).call("count", timeout=30) == 7
        finally:
            gate.open.set()
        assert len(large.result(60)) == len(value)


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

"""What callers without a token can ask of a server that wants one, and what that costs the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2

from farcall.kserve import inference_pb2
from farcall.serving import Limits, Server

Serve = Callable[..., Server]
Open = Callable[..., Any]

TOKEN = "the token of the owner"
CODE = grpc.StatusCode
SECONDS = 60.0
_LIMITS = Limits(message_bytes=1 << 20, compressed=True)
SERVING = health_pb2.HealthCheckResponse(status="SERVING").SerializeToString()
LIVE = inference_pb2.ServerLiveResponse(live=True).SerializeToString()

METHODS: dict[str, bytes | None] = {
    "grpc.health.v1.Health/Check": SERVING,
    "grpc.health.v1.Health/Watch": SERVING,
    "grpc.health.v1.Health/List": None,
    "inference.GRPCInferenceService/ServerLive": LIVE,
    "inference.GRPCInferenceService/ServerReady": LIVE,
    "inference.GRPCInferenceService/ServerMetadata": None,
    "inference.GRPCInferenceService/ServerReadyOrNot": None,
    "inference.GRPCInferenceService/ModelReady": None,
    "inference.GRPCInferenceService/ModelMetadata": None,
    "inference.GRPCInferenceService/ModelInfer": None,
    "farcall.v1.FarcallService/Describe": None,
    "farcall.v1.FarcallService/Call": None,
    "farcall.v1.FarcallService/StreamCall": None,
    "farcall.v1.FarcallService/Batch": None,
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": None,
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo": None,
    "unknown.Service/Method": None,
}
"""By method, what a caller without a token is answered; None: nothing."""


@pytest.fixture
def channel(serve: Callable[..., Server]) -> Iterator[Open]:
    """Opens connections to a server with a token."""
    port = serve({"add": torch.add}, tokens=TOKEN, limits=_LIMITS).port
    opened: list[Any] = []

    def begin(*options: tuple[str, int]) -> Any:
        own = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1), *options]
        opened.append(grpc.insecure_channel(f"localhost:{port}", options=own))
        return opened[-1]

    yield begin
    for each in opened:
        each.close()


def ask(channel: Any, method: str, request: bytes, *metadata: tuple[str, str]) -> bytes | grpc.StatusCode:
    """The first answer to a call, or the code with which it is refused."""
    answers = channel.unary_stream(f"/{method}")(request, timeout=SECONDS, metadata=metadata)
    try:
        found: bytes = next(answers)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    finally:
        answers.cancel()
    return found


def test_which_methods_need_a_token(channel: Open) -> None:
    opened = channel()
    for method, answer in METHODS.items():
        for metadata in ([], [("authorization", "Bearer another token")]):
            assert (method, ask(opened, method, b"", *metadata)) == (method, answer or CODE.UNAUTHENTICATED)


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_a_request_without_a_token_is_not_read_and_not_unpacked(channel: Open, compression: Any) -> None:
    """If it were, it would be refused: it is larger than requests may be."""
    opened, request = channel(), bytes(_LIMITS.message_bytes + 1)
    for method, answer in METHODS.items():
        if answer is not None:
            answers = opened.unary_stream(f"/{method}")(request, timeout=SECONDS, compression=compression)
            assert (method, next(answers)) == (method, answer)
            answers.cancel()


def test_large_metadata_is_refused(channel: Open) -> None:
    refused = ask(channel(), "grpc.health.v1.Health/Check", b"", ("name", "x" * (1 << 20)))
    assert refused in (CODE.RESOURCE_EXHAUSTED, CODE.UNAVAILABLE, CODE.INTERNAL)
    assert ask(channel(), "grpc.health.v1.Health/Check", b"") == SERVING


def test_health_watches_are_limited_on_each_connection_and_in_all(channel: Open) -> None:
    def watch(opened: Any) -> Any:
        return opened.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=SECONDS)

    owner = channel()
    own = owner.unary_stream("/grpc.health.v1.Health/Watch")(
        b"", timeout=SECONDS, metadata=[("authorization", f"Bearer {TOKEN}")]
    )
    assert next(own) == SERVING
    first = channel()
    watches = [watch(first) for _ in range(16)]
    assert [next(each) for each in watches] == [SERVING] * 16
    with pytest.raises(grpc.RpcError) as refused:
        next(watch(first))
    assert refused.value.code() == CODE.RESOURCE_EXHAUSTED
    more = [watch(other) for other in [channel() for _ in range(16)] for _ in range(16)]
    assert [next(each) for each in more] == [SERVING] * len(more)
    with pytest.raises(grpc.RpcError) as ended:  # the oldest gives way
        next(watches[0])
    assert ended.value.code() == CODE.RESOURCE_EXHAUSTED
    assert own.is_active()  # strangers' watches end no others


def test_the_owner_of_a_token_asks_for_one_service(channel: Open) -> None:
    opened, owner = channel(), ("authorization", f"Bearer {TOKEN}")
    check = "grpc.health.v1.Health/Check"
    for service, answer in {
        "farcall.v1.FarcallService": SERVING,
        "other": CODE.NOT_FOUND,
        "x" * 5000: CODE.RESOURCE_EXHAUSTED,
    }.items():
        request = health_pb2.HealthCheckRequest(service=service).SerializeToString()
        assert ask(opened, check, request, owner) == answer
    assert ask(opened, check, b"\xff", owner) == CODE.INVALID_ARGUMENT
    request = health_pb2.HealthCheckRequest(service="other").SerializeToString()
    unknown = health_pb2.HealthCheckResponse(status="SERVICE_UNKNOWN").SerializeToString()
    assert ask(opened, "grpc.health.v1.Health/Watch", request, owner) == unknown

"""Clients of ``farcall serve``: one for plain Python, one for asyncio."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import grpc
from google.protobuf.message import Message

from farcall.client.arrays import NumpyTensors
from farcall.client.errors import ServedError, error_of, error_of_status
from farcall.grpc.values import from_value, to_value
from farcall.v1 import service_pb2 as pb

__all__ = ["AsyncClient", "Client", "Tls", "connect", "connect_async"]

_SERVICE: Final = "/farcall.v1.FarcallService/"
_OPTIONS: Final = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_TENSORS: Final = NumpyTensors()

_LARGEST_FILE: Final = 4 << 20
"""Maximum size in bytes of a file in PEM."""

_LONGEST: Final = 1e9
"""Timeout in seconds, some thirty years, for no limit: gRPC treats infinity as expired."""

_METHODS: Final[dict[str, tuple[type[Message], type[Message]]]] = {
    "Describe": (pb.DescribeRequest, pb.DescribeResponse),
    "Call": (pb.CallRequest, pb.CallResponse),
    "StreamCall": (pb.StreamCallRequest, pb.StreamCallResponse),
    "Batch": (pb.BatchRequest, pb.BatchResponse),
}


@dataclass(frozen=True, slots=True)
class Tls:
    """Options for encryption.

    Args:
        ca: path of the certificate of the authority that has signed the server's.
        cert: path of this client's certificate, if the server requires one.
        key: path of its private key.

    Raises:
        ValueError: there is one of ``cert`` and ``key`` without the other.
    """

    ca: str
    cert: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):  # gRPC would end the process
            raise ValueError("cert and key belong together: give both, or none")

    def credentials(self) -> Any:
        """Return the credentials of a channel."""
        key, cert = (None if each is None else _read(each) for each in (self.key, self.cert))
        return grpc.ssl_channel_credentials(_read(self.ca), key, cert)


def _read(path: str) -> bytes:
    """Return the content of a file in PEM; a FIFO or device is not waited for."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        content = file.read(_LARGEST_FILE + 1) if is_regular else b""
    if not 0 < len(content) <= _LARGEST_FILE:
        raise ValueError(f"{path} is no file in PEM: it is empty, too large, or no regular file")
    return content


def connect(address: str, *, token: str | None = None, tls: Tls | None = None) -> Client:
    """Make a client. The connection is made with the first call.

    Args:
        address: ``HOST:PORT``.
        token: token that authorizes this client.
        tls: options for encryption.

    Raises:
        ValueError: the address or the token is invalid, or a file of ``tls`` is not in PEM.
        OSError: a file of ``tls`` cannot be read.

    Example::

        with farcall.client.connect("localhost:8443") as client:
            probabilities = client.call("classify", images)         # numpy.ndarray
    """
    return Client(_channel(grpc, address, tls), token)


def connect_async(address: str, *, token: str | None = None, tls: Tls | None = None) -> AsyncClient:
    """Make a client for asyncio; arguments as for ``connect``.

    Example::

        async with farcall.client.connect_async("localhost:8443") as client:
            async for word in client.stream("generate", "Once upon a time"):
                print(word)
    """
    return AsyncClient(_channel(grpc.aio, address, tls), token)


def _channel(kind: Any, address: str, tls: Tls | None) -> Any:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) > 65535:  # gRPC takes it modulo 65536
        raise ValueError(f"{address!r} is not HOST:PORT, such as localhost:8443")
    if tls is None:
        return kind.insecure_channel(address, _OPTIONS)
    return kind.secure_channel(address, tls.credentials(), _OPTIONS)


class _Stubs:
    """The service's methods on a channel, and the token that is sent with each call."""

    def __init__(self, channel: Any, token: str | None) -> None:
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ValueError("a token is sent in a header: it must be printable ASCII")
        self.metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._methods: dict[str, Any] = {}
        for name, (request, response) in _METHODS.items():
            make = channel.unary_stream if name == "StreamCall" else channel.unary_unary
            self._methods[name] = make(
                _SERVICE + name,
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )

    def __call__(self, name: str, request: Any, seconds: float | None) -> Any:
        timeout = None if not seconds or seconds > _LONGEST else seconds
        return self._methods[name](request, timeout=timeout, metadata=self.metadata)


class Client:
    """Calls the functions of a server. It may be used by several threads.

    All methods raise ``ServedError`` if the server answers with an error, and ``CallError`` if it does not
    answer.
    """

    def __init__(self, channel: Any, token: str | None) -> None:
        self._channel = channel
        self._stubs = _Stubs(channel, token)

    def call(self, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a function and return its result; tensors are arrays in both directions.

        Args:
            name: name under which it is served.
            args: positional arguments.
            timeout: timeout in seconds; None or 0 for no limit, as for ``rpc.rpc_sync``.
            kwargs: keyword arguments.
        """
        request = pb.CallRequest()
        _put_call(request.call, name, args, kwargs)
        return from_value(self._ask("Call", request, timeout).value, _TENSORS)

    def stream(self, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Iterator[Any]:
        """Yield the results of a generator as they arrive; to end it early, close the iterator."""
        request = pb.StreamCallRequest()
        _put_call(request.call, name, args, kwargs)
        answers = self._stubs("StreamCall", request, timeout)
        try:
            for each in answers:
                yield from_value(each.value, _TENSORS)
        except grpc.RpcError as error:
            raise error_of(error) from None
        finally:
            answers.cancel()

    def batch(
        self,
        calls: Iterable[tuple[str, Sequence[Any]] | tuple[str, Sequence[Any], Mapping[str, Any]]],
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Make several calls in one message. Each has its result in the list, or its ``ServedError``.

        Args:
            calls: name, positional and keyword arguments of each.
            timeout: timeout in seconds for all of them, as for ``call``.
        """
        return _results(self._ask("Batch", _batch(calls), timeout))

    def describe(self, name: str = "", *, timeout: float | None = None) -> list[pb.Description]:
        """Return descriptions of all that is served, or of one name."""
        return list(self._ask("Describe", pb.DescribeRequest(name=name), timeout).served)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _ask(self, method: str, request: Any, seconds: float | None) -> Any:
        try:
            return self._stubs(method, request, seconds)
        except grpc.RpcError as error:
            raise error_of(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """Like ``Client``, for asyncio. A cancelled call is cancelled at the server."""

    def __init__(self, channel: Any, token: str | None) -> None:
        self._channel = channel
        self._stubs = _Stubs(channel, token)

    async def call(self, name: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:  # noqa: ASYNC109
        """Like ``Client.call``."""
        request = pb.CallRequest()
        _put_call(request.call, name, args, kwargs)
        return from_value((await self._ask("Call", request, timeout)).value, _TENSORS)

    async def stream(
        self,
        name: str,
        /,
        *args: Any,
        timeout: float | None = None,  # noqa: ASYNC109
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Like ``Client.stream``."""
        request = pb.StreamCallRequest()
        _put_call(request.call, name, args, kwargs)
        answers = self._stubs("StreamCall", request, timeout)
        try:
            async for each in answers:
                yield from_value(each.value, _TENSORS)
        except grpc.RpcError as error:
            raise error_of(error) from None
        finally:
            answers.cancel()

    async def batch(
        self,
        calls: Iterable[tuple[str, Sequence[Any]] | tuple[str, Sequence[Any], Mapping[str, Any]]],
        *,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> list[Any]:
        """Like ``Client.batch``."""
        return _results(await self._ask("Batch", _batch(calls), timeout))

    async def describe(self, name: str = "", *, timeout: float | None = None) -> list[pb.Description]:  # noqa: ASYNC109
        """Like ``Client.describe``."""
        return list((await self._ask("Describe", pb.DescribeRequest(name=name), timeout)).served)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def _ask(self, method: str, request: Any, seconds: float | None) -> Any:
        try:
            return await self._stubs(method, request, seconds)
        except grpc.RpcError as error:
            raise error_of(error) from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _put_call(into: pb.Invocation, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    into.name = name
    for each in args:
        to_value(each, _TENSORS, into.args.add())
    for key, each in kwargs.items():
        to_value(each, _TENSORS, into.kwargs[key])


def _batch(calls: Iterable[Sequence[Any]]) -> pb.BatchRequest:
    request = pb.BatchRequest()
    for name, args, *named in calls:
        _put_call(request.calls.add(), name, args, *(named or [{}]))
    return request


def _results(response: pb.BatchResponse) -> list[Any]:
    return [_result(each) for each in response.results]


def _result(result: pb.Result) -> Any | ServedError:
    if result.WhichOneof("outcome") == "error":
        return error_of_status(result.error)
    return from_value(result.value, _TENSORS)

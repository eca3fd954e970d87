"""The transport: a gRPC server for incoming connections, and a channel for each outgoing one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
from collections.abc import Coroutine, Iterable
from typing import Any, Final

from farcall.extras import missing
from farcall.grpc import forking  # before gRPC

try:
    import grpc

    from farcall.grpc.server import OPTIONS, Probes, bind, server_credentials
except ImportError as error:
    raise ImportError(missing("the backend GRPC", "grpc", error), name=error.name) from error

from farcall.grpc.stream import MESSAGE_BYTES, GrpcStream, as_os_error, os_error_of
from farcall.v1 import worker_pb2
from rpc.options import GrpcRpcBackendOptions, parse_listen
from rpc.rendezvous.address import ADVERTISED, host_identity, is_loopback
from rpc.runtime.limited_log import LimitedLog
from rpc.transport.base import CAPTURED_BYTES, Accepted, TransportContext, Unreachable
from rpc.transport.stream import StreamConnection
from rpc.transport.tls import pem_file

__all__ = ["SERVICE", "GrpcTransport"]

logger = logging.getLogger(__name__)

SERVICE: Final = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
METHOD: Final = "Connect"

_TICKET: Final = "farcall-ticket"
"""Metadata key of a call with the proof that its maker has the job's token."""
_SPEAKS: Final = "farcall-transport"
"""Metadata key of the answer that shows that a worker has accepted the call, and not a proxy."""

_PROCESS: Final = "farcall-process"
"""Metadata key of both with the process and its host, so that a stopped process can be distinguished from one
that computes.
"""

_OVER: Final = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""Errors of gRPC for a call that is over already."""

_LINGER_SECONDS: Final = 1.0
"""Time in seconds for the other side to notice that this one has ended a call."""
_GRACE_SECONDS: Final = 10.0
"""Time in seconds that connections may last after the listener has closed: longer than goodbyes take."""
_UNUSED_SECONDS: Final = 5
"""Timeout in seconds for a connection to speak HTTP/2, and to begin a call, so that strangers
cannot hold it.
"""
_STREAMS: Final = 1000
"""Maximum number of streams on one connection of HTTP/2, which a proxy may share between many workers."""


class GrpcTransport:
    """Connections over gRPC. Addresses are ``grpc:HOST:PORT``, IPv6 hosts in brackets; with TLS
    ``grpc:HOST:PORT/NAME``, where the certificate must have that name. Those of the option ``advertise`` have
    ``;advertised`` at the end.

    Tensors of more than 1 MiB are sent from where they are, as over TCP.
    """

    scheme = "grpc"

    def __init__(self, context: TransportContext) -> None:
        forking.begin()
        options = context.options
        self._context = context
        self._loop = context.loop
        self._options = options if isinstance(options, GrpcRpcBackendOptions) else GrpcRpcBackendOptions()
        self._name = "" if context.tls is None else f"/{context.tls.own_name()}"
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- incoming connections

    def listen(self, host: str, port: int, accepted: Accepted) -> GrpcListener:
        """Listen on ``host``, a name or an address of this machine; with port 0 the kernel picks one."""
        family, _, _, _, (bound, *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        unused = ("grpc.server_handshake_timeout_ms", "grpc.max_connection_idle_ms")
        limits = [(setting, 1000 * _UNUSED_SECONDS) for setting in unused]
        server = grpc.aio.server(options=[*self._settings(is_loopback(host)), *limits])
        refusals = LimitedLog(logger)

        async def connect(_: Any, call: Any) -> None:
            if not self._is_ours(call):
                refusals.log(logging.WARNING, "refused %s: it has no ticket of this job's", _place(call))
                await call.abort(grpc.StatusCode.UNAUTHENTICATED, "this worker wants a ticket of its job's")
            await call.send_initial_metadata(((_SPEAKS, "1"), (_PROCESS, _own_process())))
            stream = GrpcStream(self._loop, call)
            accepted(self._connection(stream, _place(call), call.invocation_metadata()))
            with contextlib.suppress(asyncio.CancelledError):  # the other side is gone, or the loop ends
                await stream.run()

        method = grpc.stream_stream_rpc_method_handler(connect)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: method}),))
        probes = Probes((SERVICE,), self._is_ours)
        probes.add_to(server)
        tls = self._context.tls
        port = bind(server, str(bound), port, None if tls is None else server_credentials(tls.options))
        own = f"[{bound}]:{port}" if family == socket.AF_INET6 else f"{bound}:{port}"
        at = self._options.advertise or own
        address = f"grpc:{at}{self._name}{'' if at == own else ADVERTISED}"
        return GrpcListener(self._loop, server, probes, address, port)

    def _is_ours(self, call: Any) -> bool:
        tickets = self._context.tickets
        if tickets is None:
            return True
        shown = (value for key, value in call.invocation_metadata() or () if key == _TICKET)
        return any(isinstance(each, str) and tickets.is_ticket(each) for each in shown)

    # ---- outgoing connections

    async def connect(self, address: str) -> StreamConnection:
        own = address.removesuffix(ADVERTISED)
        try:
            return await self._connect(own)
        except ConnectionRefusedError as error:
            if own == address:
                raise
            raise Unreachable(f"{error.strerror}, where something else listens for it") from error

    async def _connect(self, address: str) -> StreamConnection:
        place, _, name = address.removeprefix("grpc:").partition("/")
        found = await self._loop.getaddrinfo(*parse_listen(place), type=socket.SOCK_STREAM)
        remote = {forking.place(where) for *_, where in found}
        channel = self._channel(place, name)
        try:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(**self._credentials())
            answer = await call.initial_metadata() or ()
            if _SPEAKS not in dict(answer):
                raise _refusal(await call.code(), await call.details())
        except grpc.RpcError as error:
            await channel.close()
            raise as_os_error(error) from error
        except BaseException:
            await channel.close()
            raise
        stream = GrpcStream(self._loop, call, remote)
        self._keep(self._run(stream, call, channel))
        return self._connection(stream, address, answer)

    async def _run(self, stream: GrpcStream, call: Any, channel: Any) -> None:
        receiving = self._loop.create_task(stream.receive())
        try:
            await stream.send()
            with contextlib.suppress(*_OVER):
                await call.done_writing()
            await asyncio.wait([receiving], timeout=_LINGER_SECONDS)
        finally:
            stream.shut_down()
            receiving.cancel()
            await channel.close()

    def _channel(self, place: str, name: str) -> Any:
        settings = self._settings(is_loopback(parse_listen(place)[0]))
        tls = self._context.tls
        if tls is None:
            return grpc.aio.insecure_channel(place, settings)
        files = tls.options
        credentials = grpc.ssl_channel_credentials(
            *(pem_file(name, getattr(files, name)) for name in ("ca", "key", "cert"))
        )
        if name:
            settings.append(("grpc.ssl_target_name_override", name))
        return grpc.aio.secure_channel(place, credentials, settings)

    def _credentials(self) -> dict[str, Any]:
        """What a call is made with: the ticket, as credentials of the call. Without TLS gRPC allows none, so
        it goes as what they are made of.
        """
        tickets, process = self._context.tickets, (_PROCESS, _own_process())
        if tickets is None:
            return {"metadata": (process,)}
        ticket = (_TICKET, tickets.ticket())
        if self._context.tls is None:
            return {"metadata": (process, ticket)}
        return {
            "metadata": (process,),
            "credentials": grpc.metadata_call_credentials(lambda _, show: show((ticket,), None)),
        }

    # ---- both

    def _settings(self, local: bool) -> list[tuple[str, int | str]]:
        """Return the options of a server, or of a channel, which is not shared with other connections."""
        options = self._options
        settings: list[tuple[str, int | str]] = [
            *OPTIONS,
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", _STREAMS),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
        ]
        if local:
            settings.append(("grpc.enable_http_proxy", 0))
        elif options.keepalive:
            settings += [
                ("grpc.keepalive_time_ms", int(1000 * options.keepalive)),
                ("grpc.keepalive_timeout_ms", int(1000 * options.keepalive_timeout)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
            ]
        settings += [
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),  # others' options may ask for more
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
            ("grpc.http2.max_ping_strikes", 0),
        ]
        return settings

    def _connection(
        self, stream: GrpcStream, description: str, metadata: Iterable[tuple[str, Any]]
    ) -> StreamConnection:
        connection = StreamConnection(self._context, stream, description, CAPTURED_BYTES)
        connection.scheme = self.scheme
        connection.process = _process(dict(metadata).get(_PROCESS))
        return connection

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class GrpcListener:
    """A server, until closed. On the loop's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, server: Any, probes: Probes, address: str, port: int
    ) -> None:
        self.address = address
        self.port = port
        self._loop = loop
        self._server = server
        self._probes = probes
        self._open = True
        self._task = loop.create_task(server.start())

    def close(self) -> None:
        """Stop listening."""
        if self._open:
            self._open = False
            self._task = self._loop.create_task(self._end(self._task))

    async def _end(self, beginning: asyncio.Task[None]) -> None:
        try:
            await beginning
            self._probes.ending()
        finally:  # also when the agent's loop ends
            await self._server.stop(_GRACE_SECONDS)

    def abandon(self) -> None:
        """Release the descriptors in a forked child; the parent continues to use them."""
        self._open = False
        forking.abandon(self, local=self.port)


def _own_process() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{host_identity()} {namespace} {os.getpid()}"


def _process(text: object) -> int | None:
    """Return the id of a process on this host; None if it is unknown, or on another."""
    if not isinstance(text, str) or not text:
        return None
    where, _, number = text.rpartition(" ")
    here, _, _ = _own_process().rpartition(" ")
    return int(number) if where == here and re.fullmatch("[0-9]{1,10}", number) else None


def _place(call: Any) -> str:
    """Return the address of a caller."""
    return str(call.peer()).partition(":")[2]


def _refusal(code: Any, details: str | None) -> OSError:
    if code is grpc.StatusCode.UNAVAILABLE:
        return os_error_of(code, str(details))
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return PermissionError(f"it refused the connection: {details}")
    return ConnectionError(f"what answers is no worker: {code.name} {details or ''}")

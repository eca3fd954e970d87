"""The server: one port, a thread with an event loop, and a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Final, Self

import grpc

from farcall.grpc.server import OPTIONS, Probes, bind, server_credentials
from farcall.scraping import Admits, published
from farcall.serving import service
from farcall.serving.admission import Limits
from farcall.serving.callers import BearerTokens, Callers
from farcall.serving.calls import Calls
from farcall.serving.endpoint import Endpoint
from farcall.serving.host import Host
from rpc.options import TlsOptions
from rpc.runtime.isolation import isolate_tasks
from rpc.runtime.loop import keep_running, new_loop
from rpc.transport.tls import TlsContexts

__all__ = ["LOOPBACK", "Server", "serve"]

_OTHERS: Final = [import_module("farcall.serving.inference")] if find_spec("farcall.kserve") else []
"""Other protocols that are served: KServe's, where it is installed."""

_SERVICES: Final = (service.SERVICE, *(each.SERVICE for each in _OTHERS))
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
"""Names of this host that other hosts cannot reach."""
_NO_END: Final = 1e9
"""Timeout in seconds for no limit; gRPC does not accept None."""

_PARTING: Final = 1.0
"""Time in seconds for calls that arrived when the server was stopped to be refused. Streams without an end,
such as those of health watchers, are cut off then.
"""

_GATHERING: Final = 3.0
"""Maximum time in seconds for calls to cease, once all accepted ones are answered."""

_UNCOMPRESSED: Final = (("grpc.compression_enabled_algorithms_bitset", 1),)
"""Only the first algorithm, which is none. Others are refused as UNIMPLEMENTED, and nothing is
decompressed.
"""

_UNREAD: Final = (("grpc.http2.bdp_probe", 0), ("grpc.server_handshake_timeout_ms", 10_000))
"""Limits for strangers: of a message that is not read, 64 KB arrive, not several MB, as gRPC would take on
a fast network; and a connection has this time to speak HTTP/2.
"""

_STREAMS: Final = 1000
"""Maximum number of calls that one connection may have under way."""


def serve(
    endpoints: Mapping[str, Any],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tokens: Mapping[str, str | bytes] | str | bytes | None = None,
    tls: TlsOptions | None = None,
    client_certificates: bool = True,
    insecure: bool = False,
    limits: Limits | None = None,
    tracebacks: bool = False,
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
) -> Server:
    """Serve functions and modules to clients in any language, over gRPC, in this process.

    Args:
        endpoints: what is served, by name: an ``Endpoint``, or a value for its ``call``.
        host: the address to listen on.
        port: the port to listen on; 0 for any, see ``Server.port``.
        tokens: the tokens that callers must have, one for all or one each by the caller's name.
        tls: encrypts; callers need certificates of the same authority.
        client_certificates: False: with TLS, callers need no certificate, only a token if there are any.
        insecure: whether to listen beyond this host although anyone who reaches the port may call.
        limits: how many calls are accepted at once.
        tracebacks: whether errors for callers contain tracebacks.
        metrics_port: port for Prometheus metrics; 0 for any.
        metrics_host: the address for metrics. Beyond this host, they need one of ``tokens``, or a certificate
            if callers need one, and are encrypted if calls are.

    Returns:
        The running server; it ends with ``stop()`` or at the end of its ``with`` block.

    Raises:
        ValueError: an argument is invalid, or anyone who reaches the port could call.
        OSError: the port is taken.

    Example::

        with farcall.serve({"add": torch.add, "classify": model}, port=8443) as server:
            server.wait()
    """
    if tokens is not None and not tokens:
        raise ValueError("tokens is empty: give one, or None")
    if not endpoints:
        raise ValueError("there is nothing to serve: endpoints is empty")
    names: Iterable[object] = endpoints  # whatever a program has put there
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"{name!r} cannot be a name of what is served; it must be a text, and not empty")
    if port and port == metrics_port:
        raise ValueError(f"port and metrics_port are both {port}; give metrics one of their own")
    trusted = bool(tokens) or (tls is not None and client_certificates)
    reached = [(host, "call what is served")]
    if metrics_port is not None:
        reached.append((metrics_host, "read metrics"))
    for each, could in reached:
        if each not in LOOPBACK and not trusted and not insecure:
            raise ValueError(
                f"anyone who reaches {each} could {could}. Give tokens (--token-file), or TLS with "
                "certificates for callers (--cert, --key and --ca), or say insecure=True (--insecure)"
            )
    named = tokens if isinstance(tokens, Mapping) else {"caller": tokens} if tokens else {}
    callers = Callers(named, certificates=tls is not None and client_certificates)
    served = {
        name: each if isinstance(each, Endpoint) else Endpoint(each) for name, each in endpoints.items()
    }
    credentials = None if tls is None else server_credentials(tls, client_certificates)
    server = Server(served, limits or Limits(), callers, tracebacks=tracebacks)
    metrics = None if metrics_port is None else (metrics_host, metrics_port)
    encrypted = None if tls is None or metrics_host in LOOPBACK else _https(tls, client_certificates)
    server._start(host, port, credentials, metrics, encrypted)
    return server


def _https(tls: TlsOptions, client_certificates: bool) -> ssl.SSLContext:
    if client_certificates:
        return TlsContexts.of(tls).server
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    return context


class Server:
    """A running server; made by ``serve``.

    Attributes:
        port: port at which it listens.
        metrics_port: port for Prometheus to read its metrics; None without.
    """

    port: int
    metrics_port: int | None = None

    def __init__(
        self, endpoints: Mapping[str, Endpoint], limits: Limits, callers: Callers, *, tracebacks: bool
    ) -> None:
        self._endpoints = endpoints
        self._limits = limits
        self._callers = callers
        self._tracebacks = tracebacks
        self._ended = threading.Event()
        self._on_exit = ExitStack()
        self._stopping = threading.Lock()
        self._cut_off = 0
        self._grace: Future[float | None] = Future()

    def stop(self, grace: float | None = None) -> int:
        """Accept no more calls, and return when all accepted ones are answered.

        Args:
            grace: time in seconds until the rest are cut off; None for no limit.

        Returns:
            The number of functions that still run in threads, which cannot be ended: the process ends after
            them.
        """
        with self._stopping:
            if not self._grace.done():
                self._grace.set_result(grace)
        self._thread.join()
        return self._cut_off

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server is stopped.

        Returns:
            False if it is still running after ``timeout`` seconds.
        """
        return self._ended.wait(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(grace=0.0 if error is not None else None)

    # ---- its thread

    def _start(self, *where: Any) -> None:
        begun: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(*where, begun), name="farcall serving")
        self._thread.daemon = True
        self._thread.start()
        begun.result()

    def _run(self, *args: Any) -> None:
        begun: Future[None] = args[-1]
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner, self._on_exit:
                self._loop = runner.get_loop()
                isolate_tasks(self._loop)
                serving = self._loop.create_task(self._serve(*args))
                serving.add_done_callback(lambda _: self._loop.stop())
                keep_running(self._loop, serving.done)
                serving.result()
        except BaseException as error:
            if begun.done():
                raise
            begun.set_exception(error)
        finally:
            self._ended.set()

    async def _serve(
        self,
        host: str,
        port: int,
        credentials: Any,
        metrics: tuple[str, int] | None,
        encrypted: ssl.SSLContext | None,
        begun: Future[None],
    ) -> None:
        served = Host(self._endpoints, self._limits)
        self._on_exit.callback(served.slots.close)
        async with contextlib.AsyncExitStack() as until_end:
            if metrics is not None:
                is_open = metrics[0] in LOOPBACK or not self._callers.have_tokens
                admits: Admits = (lambda _: True) if is_open else self._callers.has_token
                published_at = published(served.metrics.registry, *metrics, admits=admits, tls=encrypted)
                self.metrics_port = await until_end.enter_async_context(published_at)
            await self._serve_calls(served, host, port, credentials, begun)

    async def _serve_calls(
        self, served: Host, host: str, port: int, credentials: Any, begun: Future[None]
    ) -> None:
        callers = self._callers
        probes = Probes(
            _SERVICES,
            lambda context: not callers.have_tokens or callers.known(context.invocation_metadata() or ()),
        )
        interceptors = []
        if callers.have_tokens:
            open_to_all = dict(probes.health)
            for each in _OTHERS:
                open_to_all |= each.probes(served)
            interceptors = [BearerTokens(callers, served.metrics, open_to_all)]
        server = grpc.aio.server(
            interceptors=interceptors,
            options=[
                ("grpc.max_receive_message_length", self._limits.message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", _STREAMS),
                *(() if self._limits.compressed else _UNCOMPRESSED),
                *_UNREAD,
                *OPTIONS,
            ],
        )
        calls = Calls(served, self._callers, tracebacks=self._tracebacks)
        handlers = [each.handlers(served, calls) for each in (service, *_OTHERS)]
        server.add_generic_rpc_handlers(tuple(handlers))
        probes.add_to(server)
        self.port = bind(server, host, port, credentials)
        await server.start()
        begun.set_result(None)
        grace = await asyncio.wrap_future(self._grace)
        served.admission.draining = True
        probes.ending()
        deadline = math.inf if grace is None else self._loop.time() + grace
        with contextlib.suppress(TimeoutError):  # new calls still arrive, and are refused
            async with asyncio.timeout(grace):
                await served.admission.empty()
        await calls.gather(min(deadline - self._loop.time(), _GATHERING))
        stopping = asyncio.create_task(server.stop(max(0.0, min(deadline - self._loop.time(), _NO_END))))
        self._loop.call_soon(
            calls.release
        )  # after GOAWAY, so that clients' next calls are not for this server
        answered = asyncio.create_task(calls.all_answered())
        await asyncio.wait((stopping, answered), return_when=asyncio.FIRST_COMPLETED)
        answered.cancel()
        await server.stop(_PARTING)
        await stopping
        self._cut_off = served.slots.in_threads

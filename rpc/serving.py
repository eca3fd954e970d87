"""``serve``: found by its entry point, since the implementation is in a package above this one."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Protocol, Self

from rpc.entry_points import entry_points
from rpc.options import TlsOptions

__all__ = ["RunningServer", "serve"]

_GROUP: Final = "rpc.serving"
_NAME: Final = "serve"


class RunningServer(Protocol):
    """A running server.

    Attributes:
        port: port at which it listens.
        metrics_port: port for Prometheus to read its metrics; None without.
    """

    port: int
    metrics_port: int | None

    def stop(self, grace: float | None = None) -> int:
        """Accept no more calls, and return when all accepted ones are answered, or after ``grace`` seconds;
        returns how many are still running, and keep the process alive.
        """

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is stopped; False: it still runs after ``timeout`` seconds."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


def serve(
    endpoints: Mapping[str, Any],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tokens: Mapping[str, str | bytes] | str | bytes | None = None,
    tls: TlsOptions | None = None,
    client_certificates: bool = True,
    insecure: bool = False,
    limits: Any = None,
    tracebacks: bool = False,
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
) -> RunningServer:
    """Serve functions and modules to clients in any language, over gRPC, in this process; see
    ``farcall.serve`` for the arguments.

    Raises:
        ModuleNotFoundError: no installed package serves, or one of its dependencies is missing.
        ValueError: nothing is served, or anyone who reaches the port could call.
        OSError: the port is taken.

    Example::

        with rpc.serve({"add": torch.add, "classify": model}, port=8443) as server:
            server.wait()
    """
    found = entry_points(_GROUP).select(name=_NAME)
    if not found:
        raise ModuleNotFoundError(
            "nothing is installed that serves: pip install 'farcall[serve]', again where it was installed "
            "before it had rpc.serve"
        )
    server: RunningServer = next(iter(found)).load()(
        endpoints,
        host=host,
        port=port,
        tokens=tokens,
        tls=tls,
        client_certificates=client_certificates,
        insecure=insecure,
        limits=limits,
        tracebacks=tracebacks,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
    )
    return server

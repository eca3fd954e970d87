"""Opening the c10d store through which workers find each other.

TCP stores are made here and not by ``torch.distributed.rendezvous``, which has rank 0 wait in C++ until all
workers have connected and cannot say which are missing. The addresses, the environment and torchrun's own
store are treated as it does, and it serves every other kind of URL.

Three things differ. Clients knock in Python until somebody listens, which is quiet, prompt and can be
interrupted. Where the rendezvous is on loopback, the store listens there and nowhere else. And a store
file is left where it is: removing it can never be told apart from losing the first record of the next group.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from rpc.errors import RendezvousError, RendezvousTimeoutError
from rpc.rendezvous.address import is_loopback
from rpc.rendezvous.store import SharedStore, first_line
from rpc.rendezvous.waiting import Backoff, OutOfTime, Waiting, run_with_deadline

__all__ = ["open_store"]

_KNOCK_SECONDS = 2.0
_CONNECT_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 0.25
_FILE_TIMEOUT = timedelta(seconds=5)


def open_store(
    init_method: str | Store,
    rank: int | None,
    world_size: int | None,
    *,
    timeout: float,
    environ: Mapping[str, str] = os.environ,
) -> SharedStore:
    """Open the store that ``init_method`` names; rank 0 serves it if it is a TCP store and torchrun does not.

    Args:
        init_method: ``env://`` (MASTER_ADDR and MASTER_PORT), ``tcp://HOST:PORT``, ``file:///PATH``, another
            URL that PyTorch's rendezvous knows, or a store.
        rank: of this worker; ``None`` if unknown (then it does not serve).
        world_size: ``None`` for a dynamic group.
        timeout: how long to wait for a server, in seconds.
        environ: the environment.

    Raises:
        RendezvousTimeoutError: nobody serves the store, or it does not answer.
        RendezvousError: the URL or the environment lacks something, or the address is taken.

    Example::

        store = open_store("tcp://127.0.0.1:29500", 0, 2, timeout=60)
    """
    if not isinstance(init_method, str):
        given = f"the {type(init_method).__name__} given"
        return SharedStore(None, init_method, given, _host_of(init_method))
    opener, description, master = _opener(init_method, rank, world_size, environ)
    store = run_with_deadline(opener, timeout, description)
    return SharedStore(opener, store, description, master)


def _host_of(store: Store) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else None


def _opener(
    init_method: str, rank: int | None, world_size: int | None, environ: Mapping[str, str]
) -> tuple[Callable[[Waiting], Store], str, str | None]:
    url = urlsplit(init_method)
    master: str | None
    match url.scheme:
        case "env":
            master, port = _from_environment("MASTER_ADDR", environ), _port(environ)
            description = f"the rendezvous at {_joined(master, port)} (MASTER_ADDR and MASTER_PORT)"
        case "tcp":
            try:
                master, found = url.hostname, url.port
            except ValueError as error:
                raise RendezvousError(f"init_method {init_method!r}: {error}") from None
            if not master or found is None:
                raise RendezvousError(f"init_method must be tcp://HOST:PORT, got {init_method!r}")
            port = found
            description = f"the rendezvous at {_joined(master, port)}"
        case "file":
            path = url.netloc + url.path
            return (lambda waiting: _open_file(path)), f"the rendezvous file {path}", None
        case _:
            return (
                (lambda waiting: _open_other(init_method, rank, world_size, waiting)),
                f"the rendezvous {init_method}",
                url.hostname,
            )
    use_libuv = parse_qs(url.query).get("use_libuv", [environ.get("USE_LIBUV", "1")])[0] == "1"
    served_by_torchrun = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and (
        environ.get("MASTER_ADDR"),
        environ.get("MASTER_PORT"),
    ) == (master, str(port))
    opener = _TcpOpener(
        master,
        port,
        serve=rank == 0 and not served_by_torchrun,
        use_libuv=use_libuv,
        description=description,
    )
    return opener.open, description, master


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _from_environment(variable: str, environ: Mapping[str, str]) -> str:
    value = environ.get(variable)
    if not value:
        raise RendezvousError(
            f"environment variable {variable} expected, but not set. env:// takes the address of the "
            f"rendezvous from MASTER_ADDR and MASTER_PORT; set them (torchrun does), or pass "
            f"init_method='tcp://HOST:PORT' or 'file:///PATH' in the options."
        )
    return value


def _port(environ: Mapping[str, str]) -> int:
    text = _from_environment("MASTER_PORT", environ)
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise RendezvousError(f"environment variable MASTER_PORT must be a port number, is {text!r}")
    return int(text)


def _open_file(path: str) -> Store:
    directory = os.path.dirname(path)
    if not path or os.path.isdir(path) or not os.path.isdir(directory):
        raise RendezvousError(
            f"cannot use {path!r} as rendezvous file: it must be an absolute path in a directory that "
            f"exists, as in init_method='file:///tmp/rendezvous'"
        )
    if not os.access(path if os.path.exists(path) else directory, os.W_OK):
        raise RendezvousError(f"cannot use {path!r} as rendezvous file: no permission to write it")
    store = FileStore(path, -1)  # -1: never delete it
    store.set_timeout(_FILE_TIMEOUT)
    return store


def _open_other(init_method: str, rank: int | None, world_size: int | None, waiting: Waiting) -> Store:
    try:
        found = next(
            rendezvous(
                init_method,
                -1 if rank is None else rank,
                -1 if world_size is None else world_size,
                timeout=timedelta(seconds=waiting.remaining),
            )
        )
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(f"cannot open the rendezvous {init_method!r}: {first_line(error)}") from error
    store: Store = found[0]
    return store


class _TcpOpener:
    """Opens a TCP store as its server or as a client."""

    def __init__(self, host: str, port: int, *, serve: bool, use_libuv: bool, description: str) -> None:
        self._host = host
        self._port = port
        self._serve = serve
        self._use_libuv = use_libuv
        self._description = description

    def open(self, waiting: Waiting) -> Store:
        if self._serve:
            store = self._open_as_server(waiting)
            if store is not None:
                return store
            # Somebody else listens there: the server of a rank 0 that is just leaving; or another rank 0,
            # and then the log of arrivals in its store is where both will learn of each other.
        return self._open_as_client(waiting)

    def _open_as_server(self, waiting: Waiting) -> Store | None:
        listener = _loopback_listener(self._host, self._port) if self._use_libuv else None
        try:
            # Shared with any other store of this process on this port, such as a process group's.
            return TCPStore(
                self._host,
                self._port,
                None,
                True,
                timeout=timedelta(seconds=max(1.0, waiting.remaining)),
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener,
                use_libuv=self._use_libuv,
            )
        except RuntimeError as error:
            if "EADDRINUSE" in str(error) or "already in use" in str(error):
                return None
            raise RendezvousError(
                f"rank 0 cannot serve {self._description}: {first_line(error)}. "
                f"The address must be one of this host's, and the port free."
            ) from error

    def _open_as_client(self, waiting: Waiting) -> Store:
        reason = "nobody has answered yet"
        backoff = Backoff(waiting, _LONGEST_PAUSE_SECONDS)
        while True:
            try:
                patience = min(_KNOCK_SECONDS, max(0.05, waiting.remaining))
                socket.create_connection((self._host, self._port), patience).close()
                store = TCPStore(
                    self._host,
                    self._port,
                    None,
                    False,
                    timeout=timedelta(seconds=min(_CONNECT_SECONDS, max(1.0, waiting.remaining))),
                    wait_for_workers=False,
                    use_libuv=self._use_libuv,
                )
                store.set_timeout(timedelta(seconds=waiting.timeout))
                return store
            except (OSError, RuntimeError) as error:
                reason = first_line(error)
                free = isinstance(error, ConnectionRefusedError)
            if free and self._serve:
                # Whoever had the port, such as a rank 0 that was killed and whose place we take, has let go.
                served = self._open_as_server(waiting)
                if served is not None:
                    return served
            try:
                backoff.pause()
            except OutOfTime:
                raise RendezvousTimeoutError(
                    f"{self._description} has not been reachable for {waiting.timeout:g} s: {reason}. "
                    + (
                        "Its port is taken by another program; choose another."
                        if self._serve
                        else "Rank 0 serves it: check that rank 0 is running, that address and port are the "
                        "same at all workers and rank 0's own, and that no firewall is in between."
                    )
                ) from None


def _loopback_listener(host: str, port: int) -> int | None:
    """A socket that listens on loopback, for a rendezvous that is there; None to let the store listen."""
    if not is_loopback(host):
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = "127.0.0.1" if host.lower().rstrip(".") == "localhost" else host
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise RendezvousError(f"rank 0 cannot listen on {_joined(host, port)}: {error}") from error
    return listener.detach()

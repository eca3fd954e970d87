"""A worker's rank, its group's size, and their store, from arguments, ``init_method`` and environment.

The store of ``env://`` and ``tcp://`` is made here and not by ``torch.distributed.rendezvous``, in which rank
0 waits in C++ until all workers have connected, and which cannot say which are missing. Addresses,
environment and torchrun's own store are treated as there; it also opens every URL that is not known here.

Three things differ. Clients connect in Python until a server listens, which is quiet and can be interrupted.
The store listens only at the address that the rendezvous names; if that is not an address of this host (but
of a forwarder), or a name with several addresses, or loopback here alone, it has to listen on all addresses.
And a store file is not deleted: that could not be distinguished from losing the first record of the next
group.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from urllib.parse import parse_qs, urlsplit

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from rpc.errors import GroupMismatchError, RendezvousError, RendezvousTimeoutError
from rpc.rendezvous.address import is_here, is_loopback, loopback_remark, reverse_look_up_seconds
from rpc.rendezvous.engines import engine_of
from rpc.rendezvous.store import (
    Backoff,
    Opener,
    SharedStore,
    StoreWait,
    first_line,
    run_with_deadline,
    start,
)
from rpc.runtime.listening_processes import listening_processes
from rpc.runtime.notices import Notices
from rpc.runtime.process_signs import process_signs

logger = logging.getLogger(__name__)

_PROBE_SECONDS: Final = 2.0
_ANSWER_SECONDS: Final = 1.0
"""Timeout in seconds for a store's first answer; it is multiplied by four each time. It is short at first,
since a process that has just died may have accepted the connection.
"""

_MARGIN_SECONDS: Final = 0.5
"""Time in seconds by which PyTorch's store may exceed its timeout to report a wrong answer."""

_WRONG_ANSWERS: Final = 2
"""Number of wrong answers after which the port is considered to belong to another program. Text counts as
all of them.
"""

_REQUEST: Final = b"GET / HTTP/1.0\r\n\r\n"
"""Request that servers of HTTP, and most others with lines of text, answer. A store sends no answer to it."""

_SILENCE: Final = 6
"""What the times add up to that the program that has a port of this host has not answered, each with a longer
timeout, when the port is considered to belong to another program: 3 each if it is this process, 2 if its
process sleeps, so that a store would have answered, 1 if it is busy, 0 if it is stopped.
"""

_LONGEST_SILENCE_SECONDS: Final = 10.0
"""Timeout in seconds for the last of them."""

_SLOW_NAMES_SECONDS: Final = 1.0
"""Time in seconds after which a name server is reported as slow."""

_FILE_TIMEOUT: Final = timedelta(seconds=5)


class ServedTCPStore(TCPStore):
    """A TCP store whose server is this process."""


@dataclass(frozen=True)
class RankAndSize:
    """A worker's rank and the size of its group, as far as arguments and environment contain them."""

    rank: int | None  # None if a dynamic group is to choose it
    world_size: int | None  # None for a dynamic group
    single_host: bool = False  # all workers are known to be on this host


def job_key(environ: Mapping[str, str]) -> str:
    """Return the name that separates jobs that share a store: ``FARCALL_JOB``, else torchrun's run id, else
    ``default``. (Not torchrun's restart count, which differs between nodes after a restart.)
    """
    return environ.get("FARCALL_JOB") or environ.get("TORCHELASTIC_RUN_ID") or "default"


def resolve_group(
    rank: int | None,
    world_size: int | None,
    environ: Mapping[str, str],
    dynamic: bool = False,
    init_method: str = "",
) -> RankAndSize:
    """Determine rank and world size: an argument has precedence over ``init_method``, that over the
    environment.

    Args:
        rank: the argument; ``None`` or -1 if it was left out.
        world_size: the argument; ``None``, 0 or -1 if it was left out. Without any, the group is dynamic.
        environ: the environment, with ``RANK`` and ``WORLD_SIZE`` as torchrun sets them.
        dynamic: whether a dynamic group is requested, whatever ``WORLD_SIZE`` says. Then the rank may be
        unknown.
        init_method: may carry ``?rank=R&world_size=W``.

    Raises:
        GroupMismatchError: the rank is missing or outside the group, a value is not a number, or a world size
            was given together with ``dynamic``.
        TypeError: the given rank or world size is not an integer.
    """
    rank, world_size = _integer("rank", rank), _integer("world_size", world_size)
    rank = None if rank == -1 else rank
    world_size = None if world_size in (0, -1) else world_size
    if rank is None:
        rank = _look_up("rank", init_method, environ)
    if dynamic and world_size is not None:
        raise GroupMismatchError(
            f"init_rpc got world_size={world_size} and the option dynamic=True; "
            f"a dynamic group has no size: leave out one of them."
        )
    if world_size is None and not dynamic:
        world_size = _look_up("world_size", init_method, environ)
    if rank is None and not dynamic:
        raise GroupMismatchError(
            "rank parameter missing: init_rpc got no rank, and environment variable RANK expected in its "
            "place is not set. Pass rank=, start by `farcall launch` or torchrun, or ask with the option "
            "dynamic=True for a group that numbers its workers itself."
        )
    if world_size is not None and world_size <= 0:
        raise GroupMismatchError(f"the world size must be positive, got {world_size}")
    if rank is not None and (rank < 0 or (world_size is not None and rank >= world_size)):
        must = "not be negative"
        if world_size is not None:
            must = f"be from 0 to {world_size - 1} in a group of {world_size}"
        raise GroupMismatchError(
            f"the rank must {must}, got {rank}. What is not passed to init_rpc is read from RANK and "
            f"WORLD_SIZE."
        )
    local, everywhere = environ.get("LOCAL_WORLD_SIZE"), environ.get("WORLD_SIZE")
    return RankAndSize(rank, world_size, local == everywhere == str(world_size))


def _integer(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}")
    return int(value)


def _look_up(name: str, init_method: str, environ: Mapping[str, str]) -> int | None:
    """Return a number from ``init_method``, otherwise from the environment."""
    query = parse_qs(urlsplit(init_method).query)
    if name in query:
        try:
            return int(query[name][0])
        except ValueError:
            raise RendezvousError(f"{name} in init_method must be a number: {init_method!r}") from None
    text = environ.get(name.upper())
    try:
        return int(text) if text else None
    except ValueError:
        raise GroupMismatchError(
            f"environment variable {name.upper()} must be a number, is {text!r}"
        ) from None


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
        rank: rank of this worker; ``None`` if unknown (then it does not serve).
        world_size: size of the group; ``None`` for a dynamic group.
        timeout: timeout in seconds for a server to answer.
        environ: the environment.

    Raises:
        RendezvousTimeoutError: no process serves the store, or it does not answer.
        RendezvousError: the URL or the environment is incomplete, or the port is taken.
    """
    if not isinstance(init_method, str):
        given = f"the {type(init_method).__name__} given"
        return SharedStore(None, init_method, given, _host_of(init_method))
    if "://" not in init_method:
        meant = "tcp" if re.fullmatch(r"[^/]*:\d+", init_method) else "file"
        raise RendezvousError(
            f"init_method {init_method!r} does not say how to meet: write '{meant}://{init_method}' (there "
            f"are tcp://HOST:PORT, file:///PATH and env://)"
        )
    opener: Opener
    url, master = urlsplit(init_method), None
    match url.scheme:
        case "env" | "tcp":
            tcp = _TcpStore.of(init_method, rank, world_size, environ)
            opener, description, master = tcp.open, tcp.description, tcp.host
        case "file":
            path = url.netloc + url.path
            opener, description = (lambda _: _open_file(path)), f"the rendezvous file {path}"
        case _:
            opener = functools.partial(_open_by_pytorch, init_method, rank, world_size)
            description, master = f"the rendezvous {init_method}", url.hostname
    return SharedStore(opener, run_with_deadline(opener, timeout, description), description, master)


def _host_of(store: Store) -> str | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else None


def _open_file(path: str) -> Store:
    directory = os.path.dirname(path)
    if not path or os.path.isdir(path) or not os.path.isdir(directory):
        raise RendezvousError(
            f"cannot use {path!r} as rendezvous file: it must be an absolute path in a directory that "
            f"exists, as in init_method='file:///tmp/rendezvous'"
        )
    if not os.access(path if os.path.exists(path) else directory, os.W_OK):
        raise RendezvousError(f"cannot use {path!r} as rendezvous file: no permission to write it")
    try:
        store = _never_freed(FileStore(path, -1))  # -1: never delete it
    except RuntimeError as error:  # its text does not say where
        raise RendezvousError(f"cannot use {path!r} as rendezvous file: {first_line(error)}") from error
    store.set_timeout(_FILE_TIMEOUT)
    return store


def _never_freed(store: FileStore) -> FileStore:
    """Keep a file store for ever. PyTorch's store writes to its file once more when it is freed. If that is
    another file by then, it continues reading at its old position, in the middle of a record: for ever, with
    the file locked.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    return store


def _open_by_pytorch(init_method: str, rank: int | None, world_size: int | None, waiting: StoreWait) -> Store:
    place = (-1 if number is None else number for number in (rank, world_size))
    try:
        store, *_ = next(rendezvous(init_method, *place, timeout=timedelta(seconds=waiting.remaining)))
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(f"cannot open the rendezvous {init_method!r}: {first_line(error)}") from error
    assert isinstance(store, Store)
    return store


_REMEDY: Final = (
    "Rank 0 serves it, in a dynamic group the first worker on that host: check that it is running, that "
    "address and port are the same at all workers and its own, and that no firewall is in between."
)
_NAME_REMEDY: Final = (
    "It is asked for again, since a host may get its name late. Check its spelling, and that this machine's "
    "name server knows it; or give its address as a number."
)
_STRANGERS_REMEDY: Final = (
    "Check that it is a c10d store (rank 0 of this job, or torchrun's), not another program that has its "
    "port, and that its process is not stopped."
)


_NO_WAY: Final = (
    errno.ECONNREFUSED,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.EHOSTDOWN,
)


def _nobody_is_there(error: Exception) -> bool:
    """Whether no program has the port, or none can be reached: the host may be starting, or its network."""
    return isinstance(error, OSError) and error.errno in _NO_WAY


@dataclass(frozen=True)
class _TcpStore:
    """A TCP store, opened as its server or as a client."""

    host: str
    port: int
    serve: bool | None  # None: serve if no other process does, and this is the host
    use_libuv: bool
    description: str

    @classmethod
    def of(
        cls, init_method: str, rank: int | None, world_size: int | None, environ: Mapping[str, str]
    ) -> _TcpStore:
        """Read the store's address from a URL and the environment."""
        url = urlsplit(init_method)
        named = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
        if url.scheme == "env":
            host, port, origin = *_address_in(environ), " (MASTER_ADDR and MASTER_PORT)"
        else:
            try:
                if not url.hostname or url.port is None:
                    raise RendezvousError(f"init_method must be tcp://HOST:PORT, got {init_method!r}")
                host, port, origin = url.hostname, url.port, ""
            except ValueError as error:
                raise RendezvousError(f"init_method {init_method!r}: {error}") from None
        torchruns = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and named == (host, str(port))
        use_libuv = parse_qs(url.query).get("use_libuv", [environ.get("USE_LIBUV", "1")])[0] == "1"
        description = f"the rendezvous at {_joined(host, port)}{origin}"
        # In a dynamic group rank 0 may never come: the first worker on that host serves the store.
        serve = False if torchruns else True if rank == 0 else None if world_size is None else False
        return cls(host, port, serve, use_libuv, description)

    @functools.cached_property
    def _may_serve(self) -> bool:
        """Whether this worker serves the store if no other process does."""
        return is_here(self.host) if self.serve is None else self.serve

    def open(self, waiting: StoreWait) -> Store:
        """Serve the store, if this worker may and the port is free; otherwise connect to the process that has
        the port.

        That may be the server of a rank 0 that is just leaving; or of another rank 0, in which case both
        learn of each other in the log of arrivals in its store.
        """
        port_is_free, is_bound = True, False
        patience, wrong, silence, remedy = _ANSWER_SECONDS, 0, 0, _REMEDY
        backoff, notices = Backoff(waiting), Notices()
        while True:
            try:
                socket.getaddrinfo(self.host, None)  # a store that serves would retry until its timeout
                is_bound = self._may_serve and port_is_free
                if is_bound and (served := self._as_server(waiting)):
                    return served
                patience = max(patience, self._knock(waiting))
                return self._as_client(waiting, patience)
            except UnicodeError as error:  # no host can have such a name
                raise RendezvousError(f"{self._unknown(error)}. Check its spelling.") from error
            except socket.gaierror as error:
                reason, remedy = self._unknown(error), _NAME_REMEDY
            except RendezvousError:
                raise
            except (OSError, RuntimeError) as error:
                reason = first_line(error)
                if _nobody_is_there(error):
                    port_is_free, patience, wrong, silence = True, _ANSWER_SECONDS, 0, 0
                    remedy = _REMEDY + loopback_remark(self.host)
                    if is_bound:
                        reason += " (a socket of this host is bound to the port and does not listen)"
                else:
                    port_is_free, patience, remedy = False, 4 * patience, _STRANGERS_REMEDY
                    wrong_now = int("timed out" not in reason)
                    if wrong_now:
                        found = self._wrong_answers(waiting)
                        wrong_now = found if isinstance(error, TimeoutError) else max(wrong_now, found)
                        if found == _WRONG_ANSWERS:
                            reason = "it speaks another protocol"
                    if wrong_now:
                        wrong += wrong_now
                    elif self._may_serve or is_here(self.host):
                        patience = min(patience, max(_LONGEST_SILENCE_SECONDS, patience / 4))
                        silence += self._weight_of_silence()
                    if wrong >= _WRONG_ANSWERS or silence >= _SILENCE:
                        raise RendezvousError(self._taken(reason)) from error
            if notices.due():
                logger.warning(
                    "no process has answered at %s for %s: %s. %s",
                    self.description,
                    notices.waited,
                    reason,
                    remedy,
                )
            if not backoff.pause():
                lasted = f"has not been reachable for {round(waiting.timeout, 1):g} s"
                raise RendezvousTimeoutError(f"{self.description} {lasted}: {reason}. {remedy}")

    def _unknown(self, error: OSError | UnicodeError) -> str:
        """Return the error text for a host name that cannot be resolved."""
        reason = error.strerror if isinstance(error, OSError) else error
        return f"the host {self.host!r} of {self.description} cannot be found: {reason}"

    def _taken(self, reason: str) -> str:
        """Return the error text for a port that belongs to a program other than a store."""
        holder = self._holder()
        process = f"it is process {holder}; " if holder else ""
        if holder == os.getpid():
            process = f"it is process {holder}, which is this one; "
        return (
            f"port {self.port} of {self.host} is taken by a program that is not the store where workers meet "
            f"({process}{reason}). Choose another port, the same at all workers; `ss -ltnp` shows who "
            f"has this one."
        )

    def _holder(self) -> int | None:
        """Return the process that listens at the port on this host, if that can be found."""
        return listening_processes((self.port,)).get(self.port)

    def _weight_of_silence(self) -> int:
        """Return how much it says that the process that has the port on this host has not answered."""
        holder = self._holder()
        if holder == os.getpid():
            return _SILENCE // 2
        signs = None if holder is None else process_signs(holder)
        if signs is None:  # it is another user's, or in another container
            return 2
        return 0 if signs.stopped else 1 if signs.busy else 2

    def _as_server(self, waiting: StoreWait) -> Store | None:
        """Serve the store; returns None if another socket has the port, of this process or of another."""
        try:
            listener = self._listen() if self.use_libuv else None
            is_ours = listener is None and self._holder() == os.getpid()
            with self._nobody_else_binds() if is_ours else contextlib.nullcontext():
                return self._made(waiting.remaining, serve=True, listener=listener)
        except OSError:
            return None
        except RuntimeError as error:
            if "EADDRINUSE" in str(error) or "already in use" in str(error):
                return None
            raise RendezvousError(
                f"rank 0 cannot serve {self.description}: {first_line(error)}. "
                f"The address must be one of this host's, and the port free."
            ) from error

    @contextlib.contextmanager
    def _nobody_else_binds(self) -> Iterator[None]:
        """Bind the port at all addresses where it is free, so that PyTorch can only share a store of this
        process.

        It would otherwise serve a new store at an address of another family than that of the socket that has
        the port, and wait for that socket to answer.
        """
        with contextlib.ExitStack() as kept:
            for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
                with contextlib.suppress(OSError):
                    holder = kept.enter_context(socket.socket(family))
                    holder.bind((address, self.port))
            yield

    def _listen(self) -> int | None:
        """Return a socket that listens at our address only. None if the store should listen on all addresses,
        or this process has the port: stores of one process share it.

        Raises:
            OSError: another process has it. A store would serve at an address of another family then.
        """
        address = self._own_address()
        if address is None:
            return None
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, self.port), family=family, backlog=1024).detach()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                if self._holder() == os.getpid():
                    return None
                raise
            if error.errno == errno.EADDRNOTAVAIL:
                return None
            raise RendezvousError(
                f"rank 0 cannot listen on {_joined(self.host, self.port)}: {error}"
            ) from error

    def _knock(self, waiting: StoreWait) -> float:
        """Connect in Python and close the connection, since PyTorch's store prints warnings while no server
        listens.

        Returns:
            Timeout in seconds for PyTorch's store to make its own connection.
        """
        address = self.host, self.port
        with socket.create_connection(address, _at_most(_PROBE_SECONDS, waiting)) as connection:
            seconds = reverse_look_up_seconds(connection.getpeername()[0], connection.getsockname()[0])
        if seconds > _SLOW_NAMES_SECONDS:
            logger.warning(
                "the name server takes %.0f s to say which host has an address, and %s waits for that at "
                "each connection. Repair its reverse look-ups, or add the job's hosts to /etc/hosts.",
                seconds,
                self.description,
            )
        return _ANSWER_SECONDS + 4 * seconds

    def _wrong_answers(self, waiting: StoreWait) -> int:
        """Return how many wrong answers the program that has the port gives: all if it sends text, first or
        answer to a request of HTTP; one if it closes the connection unasked; otherwise none. (PyTorch's store
        does not report that in time: it retries for longer than its timeout.)
        """
        try:
            address = self.host, self.port
            with socket.create_connection(address, _at_most(_PROBE_SECONDS, waiting)) as connection:
                connection.settimeout(_at_most(_ANSWER_SECONDS, waiting))
                with contextlib.suppress(TimeoutError):
                    return _WRONG_ANSWERS if connection.recv(1) else 1
                connection.settimeout(_at_most(_ANSWER_SECONDS, waiting))
                with contextlib.suppress(OSError):  # a store may close the connection now
                    connection.sendall(_REQUEST)
                    return _WRONG_ANSWERS if connection.recv(1) else 0
        except OSError as error:
            return int(not isinstance(error, TimeoutError) and not _nobody_is_there(error))
        return 0

    def _own_address(self) -> str | None:
        """Return the one address that the host's name has, on all hosts; None if it may have another."""
        if is_loopback(self.host):
            return "127.0.0.1" if self.host.lower().rstrip(".") == "localhost" else self.host
        try:
            found = {each[4][0] for each in socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)}
        except OSError:
            return None  # the store reports the error
        address = str(found.pop())
        return None if found or is_loopback(address) else address

    def _as_client(self, waiting: StoreWait, patience: float) -> Store:
        """Connect to it. The process that has the port may never answer, and no timeout of the store covers
        that.

        Args:
            waiting: the deadline.
            patience: timeout in seconds for its answer.
        """
        seconds = min(patience, waiting.remaining)
        made = start(lambda _: self._made(seconds, serve=False), waiting)
        if not made.wait(1.25 * seconds + _MARGIN_SECONDS):
            raise TimeoutError("it accepts connections and does not answer")
        store = made.result()
        store.set_timeout(timedelta(seconds=waiting.timeout))
        return store

    def _made(self, seconds: float, *, serve: bool, listener: int | None = None) -> Store:
        return (ServedTCPStore if serve else TCPStore)(
            self.host,
            self.port,
            is_master=serve,
            timeout=timedelta(seconds=max(1.0, seconds)),
            wait_for_workers=False,
            multi_tenant=serve,  # shares this port with other stores of this process, as of a process group
            master_listen_fd=listener,
            use_libuv=self.use_libuv,
        )


def _at_most(seconds: float, waiting: StoreWait) -> float:
    """Return a timeout that hardly exceeds the deadline."""
    return min(seconds, max(0.05, waiting.remaining))


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address_in(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT."""
    for variable in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(variable):
            engine = engine_of(environ)
            if engine is not None and engine.remedy:
                raise RendezvousError(
                    f"this process was started by {engine.name}, which does not say where the workers meet "
                    f"({variable} is not set): {engine.remedy}"
                )
            raise RendezvousError(
                f"environment variable {variable} expected, but not set. env:// takes the address of the "
                f"rendezvous from MASTER_ADDR and MASTER_PORT; set them (`farcall launch` and torchrun do), "
                f"or pass init_method='tcp://HOST:PORT' or 'file:///PATH' in the options."
            )
    port = environ["MASTER_PORT"]
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise RendezvousError(f"environment variable MASTER_PORT must be a port number, is {port!r}")
    return environ["MASTER_ADDR"], int(port)

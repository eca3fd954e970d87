"""The options of an agent. Every value is checked when it is set, not when it is first used."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Final, Generic, Literal, TypeVar, cast

import torch

from rpc.device_maps import DeviceLike, DeviceMap, to_device_list, to_device_map
from rpc.entry_points import entry_points
from rpc.errors import InvalidOptionError

__all__ = [
    "AgentOptions",
    "GrpcRpcBackendOptions",
    "InvalidOptionError",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "TlsOptions",
]

DEFAULT_RPC_TIMEOUT = 60.0
UNSET_TIMEOUT: Final = -1.0
"""Value of a call's timeout that means the agent's default."""
DEFAULT_INIT_METHOD = "env://"
DEFAULT_NUM_WORKER_THREADS = 16

_MIB = 1 << 20
_SHORTEST_TOKEN: Final = 16

T = TypeVar("T")
S = TypeVar("S")


class _Option(Generic[T, S]):
    """A field that passes what is assigned to it through a check, which may also normalize it.

    Args:
        default: what an option that is not given is set to.
        check: called with the option's name and what is assigned.
        copied: called with what is stored when it is read, where that can be changed.
    """

    def __init__(
        self, default: S, check: Callable[[str, Any], T], copied: Callable[[T], T] | None = None
    ) -> None:
        self._default = default
        self._check = check
        self._copied = copied

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object | None, owner: type) -> T:
        if instance is None:  # a dataclass asks for the default
            return self._default  # type: ignore[return-value]
        value: T = instance.__dict__[self._name]
        return value if self._copied is None else self._copied(value)

    def __set__(self, instance: object, value: S) -> None:
        try:
            instance.__dict__[self._name] = self._check(self._name, value)
        except Exception as error:
            raise error.with_traceback(None) from error.__cause__  # the lines of checks explain nothing


_Integer = _Option[int, int]


def _wrong_type(name: str, value: object, wanted: str) -> TypeError:
    return TypeError(
        f"incompatible constructor arguments: {name} must be {wanted}, got {type(value).__name__} {value!r}"
    )


def _seconds(wanted: str, is_right: Callable[[float], bool]) -> Callable[[str, Any], float]:
    def check(name: str, value: object) -> float:
        if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
            raise _wrong_type(name, value, "a number of seconds")
        seconds = float(value)
        if not (is_right(seconds) and seconds < math.inf):
            raise InvalidOptionError(f"{name} must be a {wanted}, got {value!r}")
        return seconds

    return check


_positive_seconds = _seconds("positive, finite number of seconds", lambda seconds: seconds > 0)
_seconds_or_zero = _seconds(
    "non-negative, finite number of seconds (0: no timeout)", lambda seconds: seconds >= 0
)


def _integer(least: int, most: float = math.inf) -> Callable[[str, Any], int]:
    def check(name: str, value: object) -> int:
        if not hasattr(value, "__index__") or isinstance(value, bool):
            raise _wrong_type(name, value, "an integer")
        number = int(value)
        if not least <= number <= most:
            limit = f"at least {least}" if number < least else f"at most {most}"
            raise InvalidOptionError(f"{name} must be {limit}, got {number}")
        return number

    return check


def _instance(kind: type[T], wanted: str) -> Callable[[str, Any], T]:
    def check(name: str, value: object) -> T:
        if not isinstance(value, kind):
            raise _wrong_type(name, value, wanted)
        return value

    return check


_string = _instance(str, "a string")


def _or_none(check: Callable[[str, Any], T]) -> Callable[[str, Any], T | None]:
    return lambda name, value: None if value is None else check(name, value)


def _transports(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _wrong_type(name, value, "a sequence of names")
    names = tuple(value)
    known = {"unix", "tcp", "grpc", *(point.name for point in entry_points("farcall.transports"))}
    if not names or not known.issuperset(names):
        raise InvalidOptionError(f"{name} must name at least one of {sorted(known)}, got {value!r}")
    return names


def _transports_of_grpc(name: str, value: object) -> tuple[str, ...]:
    names = ("grpc",) if value is None else _transports(name, value)
    if "grpc" not in names:
        raise InvalidOptionError(f"{name} must name 'grpc' for the backend GRPC, got {value!r}")
    return names


def _listen(name: str, value: object) -> str:
    text = _string(name, value)
    parse_listen(text)
    return text


def _advertise(name: str, value: object) -> str:
    text = _string(name, value)
    try:
        _, port = parse_listen(text)
    except InvalidOptionError as error:
        raise InvalidOptionError(str(error).replace("listen", name, 1)) from None
    if not port:
        raise InvalidOptionError(f"{name} must be HOST:PORT or [IPV6]:PORT, got {text!r}")
    return text


@dataclass(frozen=True)
class TlsOptions:
    """TLS 1.3 on TCP connections, with certificates on both sides. All workers of a group have it, or none.

    Args:
        cert: path of this worker's certificate, with the chain to the authority's, in PEM.
        key: path of its private key, in PEM, not encrypted.
        ca: path of the certificate of the authority that signs those of the job's workers, and no others.

    Example::

        tls = rpc.TlsOptions(cert="worker.pem", key="worker.key", ca="ca.pem")
        options = rpc.AgentOptions(tls=tls, token_file="token")
    """

    cert: str
    key: str
    ca: str


class Token(bytes):
    """A job's token, which is not shown."""

    def __repr__(self) -> str:
        return "<a token>"


def to_token(name: str, value: object) -> Token:
    """Check a token, which errors name: text or bytes, too long to be guessed."""
    if not isinstance(value, (str, bytes)):
        raise TypeError(f"incompatible constructor arguments: {name} must be a string or bytes")
    # Bytes in the environment that are no UTF-8 are surrogates here, and count as what they are.
    token = Token(value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value)
    if len(token) < _SHORTEST_TOKEN:
        raise InvalidOptionError(
            f"{name}: a token must have at least {_SHORTEST_TOKEN} characters, this one has "
            f"{len(token)}. Make one with: python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return token


def _deserialization(name: str, value: Any) -> Literal["pickle", "safe"]:
    if value not in ("pickle", "safe"):
        raise InvalidOptionError(f'{name} must be "pickle" or "safe", got {value!r}')
    return cast('Literal["pickle", "safe"]', value)


DeviceMaps = Mapping[str, Mapping[DeviceLike, DeviceLike]]


def _device_maps(_: str, device_maps: DeviceMaps | None) -> dict[str, DeviceMap]:
    return {callee: to_device_map(each) for callee, each in (device_maps or {}).items()}


def parse_listen(text: str) -> tuple[str, int]:
    """Split ``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT`` into host and port (0: the kernel picks one).

    Raises:
        InvalidOptionError: there is no host, or the port is not one.
    """
    host, port = text, ""
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise InvalidOptionError(f"listen must be HOST, HOST:PORT or [IPV6]:PORT, got {text!r}")
        port = port[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or any(character.isspace() for character in host):
        raise InvalidOptionError(f"listen must name a host or an address, got {text!r}")
    if port and not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise InvalidOptionError(f"listen has no port from 0 to 65535 after the host: {text!r}")
    return host, int(port or 0)


@dataclass(eq=False)
class RpcBackendOptions:
    """Options that every backend has; also the base class of a registered backend's own options.

    Args:
        rpc_timeout: default timeout of a call, in seconds (default 60); 0 means none.
        init_method: where the workers meet: ``env://`` (default), ``tcp://HOST:PORT``, ``file:///PATH``.

    Raises:
        InvalidOptionError: a value is out of range.
        TypeError: a value is of the wrong type.
    """

    rpc_timeout: _Option[float, float] = _Option(DEFAULT_RPC_TIMEOUT, _seconds_or_zero)
    init_method: _Option[str, str] = _Option(DEFAULT_INIT_METHOD, _string)


@dataclass(eq=False, kw_only=True)
class AgentOptions(RpcBackendOptions):
    """Options of farcall's agent. All can also be set as attributes, until ``init_rpc`` reads them.

    Args:
        rpc_timeout, init_method: as for ``RpcBackendOptions``.
        num_worker_threads: threads that run what other workers call (default 16). More are started while
            all of them wait, so that calls which wait for calls make progress.
        max_worker_threads: up to this many threads are started as fast as calls block (default 512); beyond,
            20 a second.
        device_maps: for each callee, a map of our devices to its devices, one to one.
        devices: the local devices to use, of any accelerator; default: those that the device maps name.
        dynamic: whether to form a group that workers join and leave at any time, even if ``WORLD_SIZE`` is
            set in the environment (default ``False``: dynamic only if no world size is known).
        rendezvous_timeout: how long ``init_rpc`` waits for the store and the other workers, in seconds
            (default 300).
        switch_interval: the interpreter's thread switch interval while an agent runs, in seconds (default
            0.0005; Python's own is 0.005). A call in a process whose main thread computes waits for it two
            or three times. ``None`` leaves it alone.
        send_queue_bytes: how much one connection keeps unsent before callers wait (default 64 MiB).
        max_message_bytes: the largest message accepted from a peer (default 64 GiB); up to 64 KiB are
            accepted always. A worker that sends more gets a ``SerializationError``.
        transports: which to use, of ``"unix"``, ``"tcp"`` and those of other packages (default ``None``: the
            first two, as far as this system has them).
        shared_memory_bytes: how much shared memory large tensors for workers on this host may take (default
            1 GiB), and how much of each peer's is taken; what does not fit goes through the socket. 0 turns
            shared memory off. It is kept for further messages, and given back after 20 idle seconds.
        kept_memory_bytes: how much freed memory the process keeps for what it allocates next (default 64
            MiB), so that tensors made anew in each training step do not cost a fault for every page. A
            setting of glibc, for each of its arenas: the process may be larger by that much, and by up to 64
            MiB for each further thread that computes. 0 leaves the allocator alone, and so does an agent that
            finds ``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_`` or the like in the environment.
        tcp_stripes: maximum number of TCP connections for messages of 640 KiB and more, for each direction
            between two workers (default 2, at most 64). They are opened after the first such message, beside
            the connection that everything else goes over. Two workers use the smaller number of theirs. More
            than 2 help where the network limits each connection. 0: everything goes over one connection, as
            it does where they cannot be opened; the log says so.
        lost_after: time in seconds after which a worker that sends no heartbeat while something is awaited
            from it is lost (default 30); all calls that wait for it then fail with ``WorkerLostError``. A
            worker on this host that computes is never lost this way, even while its GIL is held. 0: never.
        reconnect_within: time in seconds within which a connection that breaks between two living workers is
            made again (default 30), and messages continue where they stopped; then the worker is lost. One
            whose address refuses, since its process has ended, is lost at once.
        slow_call_seconds: a call without an answer for this many seconds (default 30) is reported in the log,
            as a warning that says which thread waits, for which worker and function, and what the callee is
            doing: the line that it runs, and what it waits for. The report is repeated after twice the time,
            four times and so on. The ``RpcTimeoutError`` of a call with a timeout of two seconds or more says
            the same. 0: no calls are reported. Where processes are not observed, a report has only the call.
        listen: where to listen for workers on other hosts, ``HOST`` or ``HOST:PORT``; default: the
            address that reaches the rendezvous, loopback if that is on loopback. With ``0.0.0.0`` or ``[::]``
            others are told that address.
        token: the secret that proves that a worker belongs to the job: a string or bytes, at least 16 long,
            that only its workers know. Workers of one user on one host need none. Default: the
            environment's ``FARCALL_TOKEN``; see ``docs/security.md``.
        token_file: a file with the token, which only this user can read. Default: ``FARCALL_TOKEN_FILE``.
        tls: encrypt what goes over TCP; see ``TlsOptions`` (default ``None``: do not). The token is needed
            all the same. Unix sockets and shared memory do not leave the host, and are not encrypted.
        insecure: use no token (default ``False``): anyone who can reach a worker's address, or the store,
            can run code on the worker.
        deserialization: ``"pickle"`` (default), or ``"safe"``: accept only tensors, containers, scalars
            and registered functions.

    Raises:
        InvalidOptionError: a value is out of range.
        TypeError: a value is of the wrong type.
        ValueError: a device map is not one to one, or ``devices`` has others than accelerators.

    Example::

        options = rpc.AgentOptions(num_worker_threads=32, rpc_timeout=10)
        rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
    """

    rpc_timeout: _Option[float, float] = _Option(DEFAULT_RPC_TIMEOUT, _seconds_or_zero)  # by name only, here
    init_method: _Option[str, str] = _Option(DEFAULT_INIT_METHOD, _string)
    num_worker_threads: _Integer = _Option(DEFAULT_NUM_WORKER_THREADS, _integer(1))
    max_worker_threads: _Integer = _Option(512, _integer(1))
    device_maps: _Option[dict[str, DeviceMap], DeviceMaps | None] = _Option(None, _device_maps, copy.deepcopy)
    devices: _Option[list[torch.device], Iterable[DeviceLike] | None] = _Option(
        None, lambda _, devices: to_device_list(devices or ()), copy.deepcopy
    )
    dynamic: _Option[bool, bool] = _Option(False, _instance(bool, "True or False"))
    rendezvous_timeout: _Option[float, float] = _Option(300.0, _positive_seconds)
    switch_interval: _Option[float | None, float | None] = _Option(0.0005, _or_none(_positive_seconds))
    send_queue_bytes: _Integer = _Option(64 * _MIB, _integer(1))
    max_message_bytes: _Integer = _Option(64 * 1024 * _MIB, _integer(1))
    transports: _Option[tuple[str, ...] | None, Iterable[str] | None] = _Option(None, _or_none(_transports))
    shared_memory_bytes: _Integer = _Option(1024 * _MIB, _integer(0))
    kept_memory_bytes: _Integer = _Option(64 * _MIB, _integer(0))
    tcp_stripes: _Integer = _Option(2, _integer(0, 64))
    lost_after: _Option[float, float] = _Option(30.0, _seconds_or_zero)
    reconnect_within: _Option[float, float] = _Option(30.0, _seconds_or_zero)
    slow_call_seconds: _Option[float, float] = _Option(30.0, _seconds_or_zero)
    listen: _Option[str | None, str | None] = _Option(None, _or_none(_listen))
    token: _Option[bytes | None, str | bytes | None] = _Option(None, _or_none(to_token))
    token_file: _Option[str | None, str | None] = _Option(None, _or_none(_string))
    tls: _Option[TlsOptions | None, TlsOptions | None] = _Option(
        None, _or_none(_instance(TlsOptions, "TlsOptions"))
    )
    insecure: _Option[bool, bool] = _Option(False, _instance(bool, "True or False"))
    deserialization: _Option[Literal["pickle", "safe"], Literal["pickle", "safe"]] = _Option(
        "pickle", _deserialization
    )

    def set_device_map(self, to: str, device_map: Mapping[DeviceLike, DeviceLike]) -> None:
        """Add to the device map for one callee.

        Args:
            to: name of the callee.
            device_map: maps devices of this worker to the callee's.

        Raises:
            ValueError: the map is not one to one, or maps a device that an earlier call mapped elsewhere.
        """
        addition = to_device_map(device_map)
        device_maps = self.device_maps
        present = device_maps.setdefault(to, {})
        for source, target in addition.items():
            if present.get(source, target) != target:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping: {source} is already mapped to "
                    f"{present[source]} for {to!r}, cannot map it to {target} too"
                )
        present.update(addition)
        self.__dict__["device_maps"] = device_maps  # two sources of one target: ``init_rpc`` refuses that

    def set_devices(self, devices: Iterable[DeviceLike]) -> None:
        """Set the local devices, of any accelerator, that the agent uses."""
        self.devices = devices


@dataclass(eq=False, kw_only=True)
class GrpcRpcBackendOptions(AgentOptions):
    """Options of the backend that speaks gRPC, for networks that let nothing else pass: all connections
    between workers, also those on one host, are streams over HTTP/2. Large tensors go through shared memory
    on one host, as always; ``shared_memory_bytes=0`` sends them over gRPC, too.

    Takes what ``AgentOptions`` takes, and:

    Args:
        transports: default ``None``, which is ``("grpc",)``; ``("unix", "grpc")`` has workers of one host
            talk directly.
        tls: encrypt, by gRPC's credentials, with certificates on both sides. Workers check that a certificate
            has the name which its worker has told the group.
        advertise: ``HOST:PORT`` under which other workers reach this one, where that is not where it listens:
            that of a proxy or load balancer (default ``None``: where it listens).
        keepalive: time in seconds without data from the other side after which a ping of HTTP/2 is sent,
            which also keeps proxies from closing the connection (default 30); 0: never. A connection without
            an answer within ``keepalive_timeout`` seconds (default 60) is made again.

    Example::

        options = rpc.GrpcRpcBackendOptions(listen="0.0.0.0:50051", advertise="worker0.example:443")
        rpc.init_rpc("worker0", backend=rpc.BackendType.GRPC, rpc_backend_options=options)
    """

    transports: _Option[tuple[str, ...] | None, Iterable[str] | None] = _Option(None, _transports_of_grpc)
    advertise: _Option[str | None, str | None] = _Option(None, _or_none(_advertise))
    keepalive: _Option[float, float] = _Option(30.0, _seconds_or_zero)
    keepalive_timeout: _Option[float, float] = _Option(60.0, _positive_seconds)


@dataclass(eq=False, kw_only=True)
class TensorPipeRpcBackendOptions(AgentOptions):
    """Options under PyTorch's name and with PyTorch's arguments, for programs written for its agent.

    farcall's own options have their defaults. ``_transports`` and ``_channels`` are accepted and have no
    effect.

    Example::

        options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, device_maps={"worker1": {0: 1}})
    """

    _transports: InitVar[Sequence[str] | None] = None
    _channels: InitVar[Sequence[str] | None] = None

"""The address of a worker, whether two workers are on one host, and whether a worker still lives."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import secrets
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from rpc.errors import RendezvousError
from rpc.group.workers import Member

Probe = Callable[[Member], bool | None]
"""Returns whether a member lives: True, False, or None if that is unknown."""

_SIGN: Final = "sign"
"""Scheme of an address at which nothing is sent or received: it exists for as long as the worker lives."""

_PROBE_SECONDS: Final = 1.0
_PARALLEL_PROBES: Final = 16

_ELSEWHERE: Final = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses reserved for documentation. Nothing is sent there, but the kernel tells the route."""

ADVERTISED: Final = ";advertised"
"""Suffix of an address that is not the worker's own, but that of a proxy in front of it."""

_WILDCARDS: Final = (("0.0.0.0", "127.0.0.1"), ("[::]", "::1"))
"""Wildcard addresses, each with its loopback address."""


@functools.cache
def host_identity() -> str:
    """Return a text that is equal for two processes exactly if they can connect to each other's abstract Unix
    sockets: the same running kernel and network namespace. If the kernel does not provide it, the machine's
    name and hardware address.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespace = os.stat("/proc/self/ns/net")
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode():x}"
    return f"{boot}-{namespace.st_dev:x}-{namespace.st_ino:x}"


def is_loopback(host: str) -> bool:
    """Whether ``host`` means this host alone, on every host: a loopback address or ``localhost``. Names are
    not resolved: many hosts have a name that they alone resolve to loopback.
    """
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def loopback_remark(host: str) -> str:
    """Return a remark for errors if the name of a meeting place means loopback here; otherwise an empty text.
    It begins with a space.
    """
    if is_loopback(host):
        return f" Other machines cannot come to {host}, which is on each machine itself."
    try:
        address = str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return ""
    if not is_loopback(address):
        return ""
    return (
        f" Here {host} means {address}, which is on each machine itself: if rank 0 runs on another machine, "
        "correct the name in /etc/hosts, or give its address as a number."
    )


def is_here(host: str) -> bool:
    """Whether this machine has the address of a host name, so that it can listen there."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind(where)
    except OSError:
        return False
    return True


def reverse_look_up_seconds(*addresses: str) -> float:
    """Measure how many seconds it takes to look up the host names of some addresses.

    A c10d store looks up both ends of each connection, and does nothing else in the meantime. Most networks
    answer in milliseconds, even if they do not know the address.
    """
    began = time.monotonic()
    for address in {*addresses}:
        with contextlib.suppress(OSError):  # an unknown address is an answer, too
            socket.getnameinfo((address, 0), 0)
    return time.monotonic() - began


def listen_address(master: str | None, *, single_host: bool = False) -> tuple[str, int]:
    """Choose an address to listen on for workers on other hosts, as narrow as the rendezvous allows: loopback
    if the rendezvous is there, otherwise this machine's address on the route to it. Never a wildcard.

    Args:
        master: the host that serves the rendezvous; ``None`` if there is none (a file, a store in memory).
        single_host: whether all workers are known to be on this host.

    Returns:
        Host and port; port 0 means any.

    Raises:
        RendezvousError: ``master`` cannot be resolved or has no route.
    """
    if master is None or single_host:
        return "127.0.0.1", 0
    if is_loopback(master):
        return ("::1" if ":" in master else "127.0.0.1"), 0
    try:
        family, _, _, _, where = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        local = _address_towards(where, family)
    except OSError as error:
        raise RendezvousError(
            f"cannot choose an address to listen on: the rendezvous host {master!r} cannot be reached from "
            f"here ({error}). Check its name, or give the address of this host with the option listen=."
        ) from error
    if is_loopback(local):
        # This host is the master, and calls itself by a loopback address that others cannot use.
        return _address_elsewhere() or local, 0
    return local, 0


def as_others_reach_it(address: str, master: str | None) -> str:
    """Return a transport's address, ``SCHEME:HOST:PORT``, as other workers can use it: a wildcard is replaced
    by an address of this machine, since it would mean the reader's machine.

    The address is the one on the route to ``master``, the host that serves the rendezvous, or otherwise, for
    example if that is a file, on the route to other networks. An IPv4 wildcard is never replaced by an IPv6
    address.
    """
    scheme, _, rest = address.partition(":")
    for wildcard, loopback in _WILDCARDS:
        if rest.startswith(f"{wildcard}:"):
            families = _ELSEWHERE[:1] if wildcard == "0.0.0.0" else _ELSEWHERE
            host = "" if master is None else listen_address(master)[0]
            if not host or (":" in host and len(families) == 1):
                host = _address_elsewhere(families) or loopback
            if ":" in host:
                host = f"[{host}]"
            return f"{scheme}:{host}{rest.removeprefix(wildcard)}"
    return address


def _address_elsewhere(ways: Iterable[tuple[str, int]] = _ELSEWHERE) -> str | None:
    """Return this machine's address on the route to other networks, if it has one."""
    for address, family in ways:
        try:
            return _address_towards((address, 1), family)
        except OSError:
            continue
    return None


def _address_towards(where: tuple[object, ...], family: int) -> str:
    """Return this machine's address on the route to another; sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as probing:
        probing.connect(where)
        return str(probing.getsockname()[0])


class LifeSign:
    """Shows the processes of this host that a worker lives which has no Unix address: a socket whose name is
    used once, while a TCP port may belong to another process later.

    Attributes:
        address: the address to publish, ``sign:@NAME``.
    """

    available: Final = sys.platform == "linux"

    def __init__(self) -> None:
        name = f"farcall-{os.getpid()}-{secrets.token_hex(8)}"
        self.address = f"{_SIGN}:@{name}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(b"\0" + name.encode())
        self._socket.shutdown(socket.SHUT_RD)  # strangers can send nothing to it

    def close(self) -> None:
        """Show it no longer."""
        self._socket.close()


def probe(member: Member) -> bool | None:
    """Return whether a member lives, by connecting to its address and closing the connection.

    Its kernel accepts, however busy the process is, and refuses once the process is gone. Unix addresses are
    used once, so on one host the answer is exact. The TCP port of a worker on another host may belong to
    another process by now. For a worker behind a proxy on another host the answer is None.
    """
    here = member.host == host_identity()
    for address in member.addresses if here else ():
        scheme, _, name = address.partition(":@")
        if scheme in (_SIGN, "unix"):
            kind = socket.SOCK_DGRAM if scheme == _SIGN else socket.SOCK_STREAM
            return _answers(socket.AF_UNIX, b"\0" + name.encode(), kind)
    answer: bool | None = None
    for address in member.addresses:
        scheme, _, rest = address.partition(":")
        if scheme in ("tcp", "grpc") and not address.endswith(ADVERTISED):
            host, _, port = rest.partition("/")[0].rpartition(":")
            host = host.removeprefix("[").removesuffix("]")
            try:
                family, _, _, _, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
            except (OSError, ValueError):
                continue
            answer = _answers(family, where)
            if answer is not None:
                return answer
    return answer


def _answers(family: int, where: object, kind: int = socket.SOCK_STREAM) -> bool | None:
    with socket.socket(family, kind) as connection:
        connection.settimeout(_PROBE_SECONDS)
        try:
            connection.connect(where)  # type: ignore[arg-type]
        except ConnectionRefusedError:
            return False
        except OSError:
            return None
        return True


def dead_among(members: Iterable[Member], tell: Probe) -> set[int]:
    """Return the incarnations of those members that are certainly dead; several are probed at a time."""
    asked = list(members)
    with ThreadPoolExecutor(_PARALLEL_PROBES, "rpc-probe") as pool:  # starts only as many threads as needed
        answers = zip(asked, pool.map(tell, asked), strict=True)
        return {member.incarnation for member, alive in answers if alive is False}

"""Where a worker listens for others, and whether two workers are on one host."""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
import uuid

from rpc.errors import RendezvousError
from rpc.options import parse_listen

__all__ = ["host_identity", "is_loopback", "listen_address"]

_ANYWHERE = (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6))
"""Addresses reserved for documentation. Nothing is sent there, but the kernel tells the route."""


@functools.cache
def host_identity() -> str:
    """Equal for two processes exactly if one can connect to the other's abstract Unix sockets.

    That takes the same running kernel and the same network namespace. Where the kernel does not say
    (other than Linux), it is the machine's name and hardware address.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespace = os.stat("/proc/self/ns/net")
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode():x}"
    return f"{boot}-{namespace.st_dev:x}-{namespace.st_ino:x}"


def is_loopback(host: str) -> bool:
    """Whether ``host`` means this host alone, on every host: a loopback address or ``localhost``.

    Names are not resolved: many a host calls itself by a name that it alone resolves to loopback.
    """
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_address(
    master: str | None, *, option: str | None = None, single_host: bool = False
) -> tuple[str, int]:
    """Choose where to listen for workers on other hosts: as narrow as the rendezvous allows.

    Args:
        master: the host that serves the rendezvous; ``None`` if there is none (a file, a store in memory).
        option: what the user asked for, ``HOST`` or ``HOST:PORT``; it is taken as it is.
        single_host: all workers are known to be on this host.

    Returns:
        Host and port; port 0 means any. The host is loopback if the rendezvous is, else this machine's
        address on the route to ``master``. Never a wildcard, unless ``option`` is one.

    Raises:
        RendezvousError: ``master`` cannot be resolved or has no route.
        InvalidOptionError: ``option`` names no host.
    """
    if option is not None:
        return parse_listen(option)
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
        for address, its_family in _ANYWHERE:
            try:
                return _address_towards((address, 1), its_family), 0
            except OSError:
                continue
    return local, 0


def _address_towards(where: tuple[object, ...], family: int) -> str:
    """This machine's address on the route to another; sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])

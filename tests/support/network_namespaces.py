"""Two hosts on one machine: network namespaces with a link between them, where the system permits that."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator

import pytest

_CLONE_NEWNET = 0x40000000


class Hosts:
    """Two namespaces, each with one end of a link.

    Attributes:
        names: of the namespaces.
        addresses: of their ends.
        more_addresses: of their ends, too: what is blocked for these may pass for the others.
    """

    def __init__(self) -> None:
        tag = secrets.token_hex(3)
        self.names = [f"farcall-{tag}-{end}" for end in (0, 1)]
        self._devices = [f"fc{tag}{end}" for end in (0, 1)]
        self.addresses = ["10.213.7.1", "10.213.7.2"]
        self.more_addresses = ["10.213.8.1", "10.213.8.2"]

    def set_up(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        first, second = self._devices
        _ip(
            "link",
            "add",
            first,
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            second,
            "netns",
            self.names[1],
        )
        for end in (0, 1):
            for address in (self.addresses[end], self.more_addresses[end]):
                _ip("-n", self.names[end], "addr", "add", f"{address}/24", "dev", self._devices[end])
            _ip("-n", self.names[end], "link", "set", "lo", "up")
            self.set_link(end, "up")
        for end in (0, 1):  # connections to a further address come from the first one
            further, device, source = self.more_addresses[1 - end], self._devices[end], self.addresses[end]
            _ip("-n", self.names[end], "route", "add", f"{further}/32", "dev", device, "src", source)

    def tear_down(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def set_link(self, end: int, state: str) -> None:
        """Plug one end in (``up``) or out (``down``)."""
        _ip("-n", self.names[end], "link", "set", self._devices[end], state)

    def block(self, end: int) -> None:
        """Have nothing pass from one end to the other's further address."""
        _ip("-n", self.names[end], "route", "replace", "unreachable", f"{self.more_addresses[1 - end]}/32")

    def refuse(self, end: int) -> None:
        """Have all connections from one end to the other's further address refused."""
        _ip("-n", self.names[end], "route", "del", f"{self.more_addresses[1 - end]}/32")
        _ip("-n", self.names[end], "addr", "add", f"{self.more_addresses[1 - end]}/32", "dev", "lo")

    def disturb(self, *netem: str) -> None:
        """Have packets delayed or lost, both ways, as ``tc``'s ``netem`` is told; else skip the test."""
        for end in (0, 1):
            in_namespace = ["ip", "netns", "exec", self.names[end]]
            try:
                _run(*in_namespace, "tc", "qdisc", "add", "dev", self._devices[end], "root", "netem", *netem)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this kernel delays and loses no packets: {error.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts; skips the test where they cannot be had."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("there are no commands ip and tc here")
    made = Hosts()
    try:
        try:
            made.set_up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield made
    finally:
        made.tear_down()


def enter(name: str) -> None:
    """Move the calling thread into a namespace; threads that it starts are there, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    finally:
        os.close(descriptor)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)

"""``farcall doctor``: is this machine fit, and what is to be done?

This file needs no PyTorch, which takes seconds to import; what does need it is in ``farcall.trials``.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import farcall

__all__ = ["Finding", "examine", "examine_machine"]

_FILES: Final = 1024
_SHARED_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; with a ``remedy`` if it is not as it should be.

    Attributes:
        optional: it is a feature that was not installed; ``remedy`` says how to.
    """

    what: str
    found: str
    remedy: str = ""
    optional: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether something must be done."""
        return bool(self.remedy) and not self.optional

    def __str__(self) -> str:
        mark = "!!" if self.is_wrong else "--" if self.optional else "ok"
        remedy = f"{'' if self.found.endswith('.') else '.'} {self.remedy}" if self.remedy else ""
        return f"{mark}  {self.what}: {self.found}{remedy}"


def examine() -> Iterator[Finding]:
    """Look at this machine, and at what is installed."""
    yield Finding("versions", f"farcall {farcall.__version__}, Python {platform.python_version()}")
    yield from examine_machine()


def examine_machine() -> Iterator[Finding]:
    """Look at what the system offers."""
    yield _own_name()
    yield _listening(
        "TCP sockets on loopback", socket.AF_INET, ("127.0.0.1", 0), "Bring the interface `lo` up."
    )
    yield _listening(
        "Unix sockets", socket.AF_UNIX, "", "Calls on this machine go over TCP then, which is slower."
    )
    yield _shared_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = "Raise it (ulimit -n 65536): each other worker takes some files." if hard < _FILES else ""
    yield Finding("open files", f"{soft} at most, can be raised to {hard}", few)


def _own_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        remedy = "Others cannot find this machine by name: add it to DNS or /etc/hosts, or give an address."
        return Finding("host name", f"{name} does not resolve ({error.strerror})", remedy)
    return Finding("host name", f"{name} is {address}")


def _listening(what: str, family: socket.AddressFamily, address: object, remedy: str) -> Finding:
    try:
        with socket.socket(family) as listener, socket.socket(family) as sender:
            listener.bind(address)  # type: ignore[arg-type]
            listener.listen(1)
            sender.settimeout(5)
            sender.connect(listener.getsockname())
    except OSError as error:
        return Finding(what, f"no: {error}", remedy)
    return Finding(what, "work")


def _shared_memory() -> Finding:
    try:
        os.close(os.memfd_create("farcall-doctor"))
    except (AttributeError, OSError) as error:
        return Finding(
            "shared memory", f"no: {error}", "Large tensors go over sockets then, which is slower."
        )
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    limit = _memory_limit()
    if limit is not None and limit < _SHARED_BYTES:
        return Finding("shared memory", f"{limit >> 20} MiB", "Give this container more memory.")
    return Finding("shared memory", f"works (memfd; /dev/shm, with {free >> 20} MiB free, is not used)")


def _memory_limit() -> int | None:
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            text = file.read().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)

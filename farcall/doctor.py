"""``farcall doctor``: is this machine fit, can two machines meet and talk, and what is to be done?"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

import farcall
import rpc
from rpc.errors import RpcError

__all__ = ["Finding", "examine", "meet"]

_FILES: Final = 1024
_SHARED_BYTES: Final = 256 << 20
_CLOCK_SECONDS: Final = 1.0
_PAYLOAD_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; with a ``remedy`` if it is not as it should be."""

    what: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = "!!" if self.remedy else "ok"
        remedy = f"{'' if self.found.endswith('.') else '.'} {self.remedy}" if self.remedy else ""
        return f"{mark}  {self.what}: {self.found}{remedy}"


def examine() -> Iterator[Finding]:
    """Look at this machine."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    newer = "" if version >= (2, 13) else "Install PyTorch 2.13 or newer: older ones are not tested."
    yield Finding(
        "versions",
        f"farcall {farcall.__version__}, Python {platform.python_version()}, PyTorch {torch.__version__}",
        newer,
    )
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


def meet(address: str, seconds: float) -> Iterator[Finding]:
    """Meet a second machine at HOST:PORT, call it, and send it something large.

    Args:
        address: on one of the two.
        seconds: how long to wait for the other.
    """
    host, _, port = address.rpartition(":")
    try:
        resolved = socket.gethostbyname(host)
    except OSError as error:
        yield Finding(
            "meeting", f"{host!r} does not resolve ({error})", "Check the name, or give an address."
        )
        return
    yield Finding("name", f"{host} is {resolved}")
    name = f"doctor-{os.getpid()}-{''.join(c if c.isalnum() else '-' for c in socket.gethostname())}"
    options = rpc.AgentOptions(init_method=f"tcp://{host}:{port}", rendezvous_timeout=seconds, dynamic=True)
    try:
        rpc.init_rpc(name, rpc_backend_options=options)
    except (RpcError, OSError) as error:
        yield Finding(
            "meeting",
            str(error),
            "Both machines must be able to reach this address: check its port in the firewall.",
        )
        return
    try:
        other = _await_other(name, seconds)
        if other is None:
            yield Finding(
                "meeting",
                f"no other machine has come to {address} within {seconds:g} s",
                "Run the same command there.",
            )
            return
        yield from _talk(other)
        rpc.barrier(timeout=seconds)
    except RpcError as error:
        yield Finding(
            "calls",
            str(error),
            "Workers listen on ports that the kernel chooses: open them between the machines, "
            "or fix one with the option listen=.",
        )
    finally:
        rpc.shutdown(graceful=False)


def _await_other(name: str, seconds: float) -> str | None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for info in rpc.get_worker_infos():
            if info.name != name:
                return info.name
        time.sleep(0.1)
    return None


def _talk(other: str) -> Iterator[Finding]:
    host, version, torch_version = rpc.rpc_sync(other, _introduce)
    same = version == farcall.__version__ and torch_version == torch.__version__
    yield Finding(
        "the other",
        f"{host}, farcall {version}, PyTorch {torch_version}",
        "" if same else "Install the same versions on both.",
    )
    taken = min(_seconds(lambda: rpc.rpc_sync(other, _nothing)) for _ in range(20))
    yield Finding("calls", f"work, {taken * 1e6:,.0f} µs each")
    before = time.time()
    ahead = rpc.rpc_sync(other, time.time) - (before + time.time()) / 2
    yield Finding(
        "clocks",
        f"the other's is {abs(ahead) * 1e3:,.0f} ms {'ahead' if ahead > 0 else 'behind'}",
        "Times in logs do not compare: run NTP on both." if abs(ahead) > _CLOCK_SECONDS else "",
    )
    large = torch.zeros(_PAYLOAD_BYTES // 4)
    took = min(_seconds(lambda: rpc.rpc_sync(other, _nothing, args=(large,))) for _ in range(3))
    yield Finding("large tensors", f"{_PAYLOAD_BYTES / took / 1e9:.1f} GB/s")


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _introduce() -> tuple[str, str, str]:
    return socket.gethostname(), farcall.__version__, torch.__version__


def _nothing(*_: object) -> None: ...

"""A host of its own for each rank, on one machine: network namespaces, joined by a bridge.

A namespace belongs to the process that has made it and is gone with it, however it ends, and so are the
links.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__all__ = ["INTERFACE", "Hosts", "run_on_hosts", "why_not"]

INTERFACE: Final = "bench0"
"""What leads from each host to the others."""

_CLONE_NEWNET: Final = 0x40000000
_PROBE_SECONDS: Final = 30
_LIMIT_SECONDS: Final = 200
"""Maximum time for each rank of a benchmark, in seconds."""


class Hosts:
    """The hosts of ``size`` ranks, which are processes.

    Args:
        context: of ``multiprocessing``, whose processes the ranks are.
        size: number of ranks.
        count: number of hosts, each with as many ranks in a row; default one for each rank.
        link: joins two hosts in the place of the bridge.
    """

    def __init__(
        self,
        context: Any,
        size: int,
        count: int | None = None,
        link: Callable[[int, int], object] | None = None,
    ) -> None:
        count = size if count is None else count
        self._hosts = [rank * count // size for rank in range(size)]
        self._processes = context.Array("q", count)
        self._all_have = context.Barrier(size)
        self._link = link

    def enter(self, rank: int) -> str:
        """Have this process, which has one thread, be on its host; all ranks call this. Returns the host's
        address.

        Raises:
            OSError, subprocess.CalledProcessError: that cannot be.
        """
        host = self._hosts[rank]
        is_first = self._hosts.index(host) == rank
        if is_first:
            _leave_network()
            self._processes[host] = os.getpid()
        self._all_have.wait()
        if not is_first:
            _enter_network_of(self._processes[host])
        if rank == 0:
            self._join()
        self._all_have.wait()
        address = f"10.0.{host >> 8}.{(host & 255) + 1}"
        if is_first:
            _ip("address", "add", f"{address}/16", "dev", INTERFACE)
            for link in ("lo", INTERFACE):
                _ip("link", "set", link, "up")
        self._all_have.wait()
        return address

    def _join(self) -> None:
        if self._link is not None:
            self._link(*self._processes)
            return
        _ip("link", "add", INTERFACE, "type", "bridge")
        for other, process in enumerate(self._processes[1:], 1):
            link = f"to{other}"
            _ip("link", "add", link, "type", "veth", "peer", "name", INTERFACE, "netns", str(process))
            _ip("link", "set", link, "master", INTERFACE, "up")


def why_not() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    said = multiprocessing.get_context("spawn").SimpleQueue()
    trying = multiprocessing.get_context("spawn").Process(target=_try, args=(said,))
    trying.start()
    trying.join(_PROBE_SECONDS)
    trying.kill()
    return "it takes too long" if said.empty() else str(said.get()) or None


def _try(said: Any) -> None:
    try:
        Hosts(multiprocessing.get_context("spawn"), 1).enter(0)
        _ip("link", "add", "one", "type", "veth", "peer", "name", "other")
    except (OSError, subprocess.CalledProcessError) as error:
        said.put(getattr(error, "stderr", None) or str(error))
    else:
        said.put("")


def _leave_network() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"no network namespace: {os.strerror(ctypes.get_errno())}")


def _enter_network_of(process: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{process}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(
                ctypes.get_errno(), f"no other network namespace: {os.strerror(ctypes.get_errno())}"
            )


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def run_on_hosts(
    run: Callable[..., object],
    *args: object,
    size: int = 2,
    link: Callable[[int, int], object] | None = None,
) -> int:
    """Run a function on ``size`` ranks, each on a host of its own; returns the exit status of the worst one.

    Args:
        run: called with the rank, the hosts, the path of a file that all share, and ``args``.
        size: number of ranks.
        link: joins two hosts in the place of the bridge.
    """
    context = multiprocessing.get_context("spawn")
    hosts = Hosts(context, size, link=link)
    with tempfile.TemporaryDirectory(prefix="farcall-bench-") as folder:
        store = str(Path(folder) / "store")
        workers = [context.Process(target=run, args=(rank, hosts, store, *args)) for rank in range(size)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(_LIMIT_SECONDS)
            worker.kill()
    return max(abs(worker.exitcode or 0) for worker in workers)

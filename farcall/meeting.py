"""``farcall doctor --meet``: can two machines meet and talk, and how fast?"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final

import torch

import farcall
import rpc
from farcall.doctor import Finding
from rpc.errors import RpcError

__all__ = ["meet"]

_CLOCK_SECONDS: Final = 1.0
_PAYLOAD_BYTES: Final = 64 << 20


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

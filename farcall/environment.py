"""What a bug report needs: versions, and what this machine offers. Nothing secret is shown."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from importlib import metadata
from typing import Any

import farcall
from rpc.runtime.cpu_quota import usable_cores

__all__ = ["gather", "show"]

_PACKAGES = ("torch", "uvloop", "msgpack", "cloudpickle", "click", "rich", "numpy")
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")


def gather() -> dict[str, str]:
    """Facts by name, in the order in which they are shown."""
    facts = {"farcall": farcall.__version__, "installed at": os.path.dirname(farcall.__file__)}
    facts["python"] = f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"
    for package in _PACKAGES:
        facts[package] = _version(package)
    facts["event loop"] = "uvloop" if facts["uvloop"] != "not installed" else "asyncio's own"
    facts["platform"] = platform.platform()
    facts["cpus"] = f"{usable_cores()} usable of {os.cpu_count()}"
    facts["accelerators"] = _accelerators()
    facts["loopback TCP"] = _attempt(lambda: _ping(socket.AF_INET, ("127.0.0.1", 0)))
    facts["abstract Unix sockets"] = _attempt(lambda: _ping(socket.AF_UNIX, ""))
    facts["host name"] = _attempt(
        lambda: f"{socket.gethostname()} is {socket.gethostbyname(socket.gethostname())}"
    )
    facts["memfd"] = "yes" if hasattr(os, "memfd_create") else "no"
    for name in _VARIABLES:
        if name in os.environ:
            facts[name] = os.environ[name]
    for name in sorted(os.environ):
        if name.startswith("FARCALL_"):
            facts[name] = "is set" if "TOKEN" in name or "SECRET" in name else os.environ[name]
    return facts


def show(as_json: bool = False) -> None:
    """Prints the facts.

    Args:
        as_json: for programs; else a table for people.
    """
    facts = gather()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        table.add_row(f"[bold]{name}[/]", value)
    Console(soft_wrap=True).print(table)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _accelerators() -> str:
    try:
        import torch
    except ImportError:
        return "unknown, torch cannot be imported"
    if not torch.accelerator.is_available():
        return "none"
    return f"{torch.accelerator.device_count()} of type {torch.accelerator.current_accelerator()}"


def _attempt(check: Any) -> str:
    try:
        return str(check())
    except OSError as error:
        return f"no: {error}"


def _ping(family: socket.AddressFamily, address: Any) -> str:
    """Sends a byte to ourselves."""
    with socket.socket(family) as listener, socket.socket(family) as sender:
        listener.bind(address)
        listener.listen(1)
        listener.settimeout(5)
        sender.settimeout(5)
        sender.connect(listener.getsockname())
        with listener.accept()[0] as receiver:
            sender.sendall(b"?")
            return "ok" if receiver.recv(1) == b"?" else "no: a byte was lost"

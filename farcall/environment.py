"""What a bug report needs: versions, and what this machine offers. Nothing secret is shown."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata

import farcall
from farcall.doctor import examine_machine
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
    facts |= {finding.what: finding.found for finding in examine_machine()}
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

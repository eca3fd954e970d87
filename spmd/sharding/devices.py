"""The workers behind the logical device, as meshes see them."""

from __future__ import annotations

from typing import Any

from rpc.runtime.current import current_agent
from spmd.engine.driver.start import worker_names

__all__ = ["attributes"]


def attributes() -> list[dict[str, Any]]:
    """Of each worker: ``name``, ending in its number; with several hosts, ``slice_index``, its host's.

    Raises:
        NotInSpmdModeError: :func:`spmd.use_spmd` was not called.
    """
    names = worker_names()
    agent: Any = current_agent()
    hosts = [agent.group.peers.find(name).member.host for name in names]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return [
        {"name": f"CPU:{number}", **({"slice_index": numbers[host]} if len(numbers) > 1 else {})}
        for number, host in enumerate(hosts)
    ]

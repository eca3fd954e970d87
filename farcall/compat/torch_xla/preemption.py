"""``torch_xla._XLAC``'s preemption: whether SIGTERM has come, by which a machine is taken away."""

from __future__ import annotations

import signal

from rpc.runtime.preemption import Watch

__all__ = [
    "_activate_preemption_sync_manager",
    "_deactivate_preemption_sync_manager",
    "_ensure_xla_coordinator_initialized",
    "_sync_point_reached",
]

_watch: Watch | None = None


def _ensure_xla_coordinator_initialized(
    global_rank: int, world_size: int, master_addr: str, master_port: str = ""
) -> None:
    """Nothing: there is one process, which need not agree with others."""


def _activate_preemption_sync_manager() -> None:
    """Note SIGTERM from now on, beside what the program does with it. On the main thread."""
    global _watch
    _watch = Watch((signal.SIGTERM,))


def _deactivate_preemption_sync_manager() -> None:
    """Undo :func:`_activate_preemption_sync_manager`."""
    global _watch
    if _watch is not None:
        _watch.close()
        _watch = None


def _sync_point_reached(step: int) -> bool:
    """Whether SIGTERM has come since."""
    return _watch is not None and _watch.preempted

"""``torch_xla._XLAC``'s preemption: whether SIGTERM has come, by which a machine is taken away."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = [
    "_activate_preemption_sync_manager",
    "_deactivate_preemption_sync_manager",
    "_ensure_xla_coordinator_initialized",
    "_sync_point_reached",
]

_came = threading.Event()
_before: Any = None


def _ensure_xla_coordinator_initialized(
    global_rank: int, world_size: int, master_addr: str, master_port: str = ""
) -> None:
    """Nothing: there is one process, which need not agree with others."""


def _note(number: int, frame: FrameType | None) -> None:
    _came.set()
    if callable(_before):
        _before(number, frame)


def _activate_preemption_sync_manager() -> None:
    """Note SIGTERM from now on, beside what the program does with it. On the main thread."""
    global _before
    _came.clear()
    _before = signal.signal(signal.SIGTERM, _note)


def _deactivate_preemption_sync_manager() -> None:
    """Undo :func:`_activate_preemption_sync_manager`."""
    global _before
    if _before is not None:
        signal.signal(signal.SIGTERM, _before)
        _before = None


def _sync_point_reached(step: int) -> bool:
    """Whether SIGTERM has come since."""
    return _came.is_set()

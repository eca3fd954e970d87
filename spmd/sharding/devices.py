"""The workers behind the logical device, as meshes see them."""

from __future__ import annotations

from typing import Any

__all__ = ["attributes", "count"]


def count() -> int:
    """How many workers there are.

    Raises:
        RuntimeError: :func:`spmd.use_spmd` was not called.
    """
    from spmd.engine.api import workers_count

    return workers_count()


def attributes() -> list[dict[str, Any]]:
    """Of each worker: ``name``, ending in its number; with several hosts, ``slice_index``, its host's."""
    return [{"name": f"CPU:{number}"} for number in range(count())]

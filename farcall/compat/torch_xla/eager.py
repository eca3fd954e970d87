"""``torch_xla.experimental.eager``: whether each operation runs at once. Here all are recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["eager_mode", "eager_mode_context", "is_eager_mode"]

_is_eager = False


def eager_mode(enable: bool) -> None:
    """Record the setting. Values are the same, and workers begin when the program needs one."""
    global _is_eager
    _is_eager = enable


def is_eager_mode() -> bool:
    """Return the value that was set."""
    return _is_eager


@contextlib.contextmanager
def eager_mode_context(enable: bool) -> Iterator[None]:
    """Ask for it inside."""
    before = _is_eager
    eager_mode(enable)
    try:
        yield
    finally:
        eager_mode(before)

"""Texts of other processes in log lines and errors."""

from __future__ import annotations

from typing import Final

__all__ = ["legible"]

_LONGEST_TEXT: Final = 1000


def legible(text: object) -> str:
    """Make another process's text, or error, fit for logs and errors: one line, of limited length, without
    control characters. Never raises.
    """
    try:
        shown = str(text)[:_LONGEST_TEXT]
    except Exception:
        shown = f"{type(text).__name__}, whose text is not available"
    return shown if shown.isprintable() else repr(shown)

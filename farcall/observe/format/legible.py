"""Texts of programs, such as names, errors and output, for terminals and viewers."""

from __future__ import annotations

__all__ = ["legible"]


def legible(text: str, kept: str = "") -> str:
    """Return a text with its control characters escaped as in a string literal, except those in ``kept``."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in kept else repr(each)[1:-1] for each in text)

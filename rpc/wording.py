"""Words of error messages."""

from __future__ import annotations

__all__ = ["with_article"]


def with_article(kind: type | str) -> str:
    """The name of a type behind "a" or "an", by its first letter: "an int", "a list"; "u" as in "unit"."""
    name = kind if isinstance(kind, str) else kind.__name__
    return f"{'an' if name[:1].lower() in ('a', 'e', 'i', 'o') else 'a'} {name}"

"""How members of enumerations travel: by value, whatever the Python at either end.

CPython 3.11.0 to 3.11.3 pickle them by name, through ``getattr``, which safe mode must not admit; all others
by value.
"""

from __future__ import annotations

import enum
from typing import Any, Final

__all__ = ["reduce_enum"]

_STANDARD: Final = (enum.Enum.__reduce_ex__, enum.Flag.__reduce_ex__)


def reduce_enum(member: enum.Enum, _: Any) -> Any:
    """The reducer of enumerations; those that say themselves how they are pickled are left alone."""
    kind = type(member)
    if kind.__reduce_ex__ not in _STANDARD:
        return NotImplemented
    return kind, (member.value,)

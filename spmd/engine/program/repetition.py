"""Avoids sending what repeats from run to run of a program.

Both ends keep one of these for each program and pass it every run, so that their predictions are equal. In a
training loop an input's id is the same as in the last run (a mask), or at the same distance from the run's
first id (a result of the last step); and numbers come in groups that are equal (one learning rate for all
parameters).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["Repetition"]

Packed = tuple[tuple[int, ...] | None, tuple[Any, ...] | dict[int, Any]]


class Repetition:
    """One end's memory of a program's last run."""

    def __init__(self) -> None:
        self._base = 0
        self._ids: tuple[int, ...] = ()
        self._moving: list[bool] = []
        self._groups: list[int] | None = None
        self._numbers: dict[int, Any] = {}

    def pack(self, base: int, ids: tuple[int, ...], numbers: tuple[Any, ...]) -> Packed:
        """Return the message for a run with these inputs and numbers."""
        packed_ids = None if ids == self._guessed(base) else ids
        self._learn_ids(base, ids)
        groups = _groups(numbers)
        of_group = dict(zip(groups, numbers, strict=True))
        packed: tuple[Any, ...] | dict[int, Any] = numbers
        if groups == self._groups:
            last = self._numbers
            packed = {group: each for group, each in of_group.items() if _key(each) != _key(last[group])}
        self._groups, self._numbers = groups, of_group
        return packed_ids, packed

    def unpack(self, base: int, packed: Packed) -> tuple[tuple[int, ...], list[Any]]:
        """Return the inputs and numbers, at the other end."""
        packed_ids, packed_numbers = packed
        ids = self._guessed(base) if packed_ids is None else packed_ids
        self._learn_ids(base, ids)
        if isinstance(packed_numbers, tuple):
            self._groups = _groups(packed_numbers)
            self._numbers = dict(zip(self._groups, packed_numbers, strict=True))
            return ids, list(packed_numbers)
        assert self._groups is not None
        self._numbers.update(packed_numbers)
        return ids, [self._numbers[group] for group in self._groups]

    def _guessed(self, base: int) -> tuple[int, ...]:
        shift = base - self._base
        return tuple(
            [each + shift if moves else each for each, moves in zip(self._ids, self._moving, strict=True)]
        )

    def _learn_ids(self, base: int, ids: tuple[int, ...]) -> None:
        shift = base - self._base
        if len(ids) != len(self._ids):
            self._moving = [True] * len(ids)
        else:
            self._moving = [new - old == shift for new, old in zip(ids, self._ids, strict=True)]
        self._base, self._ids = base, ids


def _key(number: Any) -> Any:
    """Return a key that is equal only for numbers that are the same in every bit."""
    return struct.pack("d", number) if type(number) is float else (type(number), number)


def _groups(numbers: Sequence[Any]) -> list[int]:
    """Return for each number the index of the first one that is equal."""
    first: dict[Any, int] = {}
    return [first.setdefault(_key(number), place) for place, number in enumerate(numbers)]

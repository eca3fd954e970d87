"""Changes inputs a little: as bytes, and as the values that they stand for.

What an input is made of is either bytes as such, or values in msgpack, one behind the other. Of the latter,
parts are replaced, left out, repeated and exchanged, so that most of what comes out is nearly right.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any, Final

import msgpack

__all__ = ["Mutator", "packed", "unpacked"]

LONGEST: Final = 64 << 10
"""Bytes of an input."""

_INTERESTING: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, 2, 3, -1, 7, 8, 9, 64, 127, 128, 255, 256, 4095, 4096, 4097),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)),
    *(
        0.5,
        float("inf"),
        float("nan"),
        "",
        "x",
        "\ud800",
        "x" * 300,
        b"",
        b"y",
        b"\0" * 32,
        [],
        {},
        [[]],
        [0, 0],
    ),
)
_LENGTHS: Final = (0, 1, 7, 8, 9, 27, 28, 29, 255, 256, 0x7FFF_FFFF, 0xFFFF_FFFF, 1 << 62, (1 << 64) - 1)


def packed(values: Sequence[Any]) -> bytes:
    """Values as an input, one behind the other."""
    packer = msgpack.Packer(unicode_errors="surrogatepass")
    return b"".join(packer.pack(value) for value in values)


def unpacked(data: bytes) -> list[Any]:
    """The values of an input, as far as it can be read."""
    unpacker = msgpack.Unpacker(strict_map_key=False, unicode_errors="surrogatepass", max_buffer_size=1 << 20)
    unpacker.feed(data)
    values: list[Any] = []
    with contextlib.suppress(Exception):  # what is behind it cannot be read
        values.extend(unpacker)
    return values


class Mutator:
    """Makes new inputs of others; the same for the same seed.

    Example::

        mutator = Mutator(seed=1)
        mutator.of_bytes(b"some input", pool=[b"another"])
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def of_bytes(self, data: bytes, pool: Sequence[bytes]) -> bytes:
        """Bytes, a few of which are changed, left out, repeated, or come from another input."""
        chance, changed = self.chance, bytearray(data)
        for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
            at = chance.randrange(len(changed) + 1)
            match chance.randrange(7):
                case 0 if at < len(changed):
                    changed[at] ^= 1 << chance.randrange(8)
                case 1 if at < len(changed):
                    changed[at] = chance.randrange(256)
                case 2:
                    changed[at:at] = chance.randbytes(chance.randrange(1, 9))
                case 3:
                    del changed[at : at + chance.randrange(1, 17)]
                case 4:
                    size = chance.choice((1, 2, 4, 8))
                    length = chance.choice(_LENGTHS) & ((1 << 8 * size) - 1)
                    changed[at : at + size] = length.to_bytes(size, chance.choice(("little", "big")))
                case 5:
                    other = chance.choice(pool)
                    begin = chance.randrange(len(other) + 1)
                    changed[at:at] = other[begin : begin + chance.randrange(1, 64)]
                case 6:
                    end = min(len(changed), at + chance.randrange(1, 64))
                    changed[at:at] = changed[at:end] * chance.choice((1, 1, 2, 20))
        return bytes(changed[:LONGEST])

    def of_values(self, data: bytes, pool: Sequence[bytes]) -> bytes:
        """Values, some parts of which are replaced, left out, repeated, or come from another input."""
        values = unpacked(data)
        for _ in range(self.chance.choice((1, 1, 2, 3))):
            values = self._changed(values, pool)
        try:
            return packed(values)[:LONGEST]
        except ValueError:  # they have become too deep
            return data

    def _changed(self, values: list[Any], pool: Sequence[bytes]) -> list[Any]:
        chance = self.chance
        match chance.randrange(6):
            case 0:
                other = unpacked(chance.choice(pool))
                begin = chance.randrange(len(other) + 1)
                at = chance.randrange(len(values) + 1)
                return values[:at] + other[begin : begin + chance.randrange(1, 5)] + values[at:]
            case 1 if len(values) > 1:
                chance.shuffle(values)
                return values
        holders = _holders(values)
        holder = chance.choice(holders)
        place = self._place(holder)
        match chance.randrange(5):
            case _ if place is None:
                if isinstance(holder, list):
                    holder.append(self._scalar(values))
            case 0:
                holder.pop(place)
            case 1 if isinstance(holder, list):
                holder.insert(place, holder[chance.randrange(len(holder))])
            case _:
                holder[place] = self._near(holder[place], values)
        return values

    def _place(self, holder: Any) -> Any:
        if not holder:
            return None
        return self.chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))

    def _near(self, value: Any, values: list[Any]) -> Any:
        chance = self.chance
        if isinstance(value, bytes) and value and chance.random() < 0.7:
            return self.of_bytes(value, [value])
        if type(value) is int and chance.random() < 0.3:
            return max(-(1 << 63), min((1 << 64) - 1, value + chance.choice((-1, 1, 2, 64, -64))))
        return self._scalar(values)

    def _scalar(self, values: list[Any]) -> Any:
        """Something that occurs elsewhere in the input, or that is at the limit of something."""
        if self.chance.random() < 0.5:
            holder = self.chance.choice(_holders(values))
            place = self._place(holder)
            if place is not None:
                return _copied(holder[place])
        return _copied(self.chance.choice(_INTERESTING))


def _holders(values: Any) -> list[Any]:
    """All lists and maps in some values, these included."""
    found: list[Any] = [values]
    for holder in found:
        parts = holder.values() if isinstance(holder, dict) else holder
        found.extend(part for part in parts if isinstance(part, list | dict))
        if len(found) > 1000:
            break
    return found


def _copied(value: Any, depth: int = 8) -> Any:
    if not isinstance(value, list | dict):
        return value
    if not depth:
        return None
    if isinstance(value, list):
        return [_copied(each, depth - 1) for each in value[:50]]
    return {key: _copied(each, depth - 1) for key, each in value.items()}

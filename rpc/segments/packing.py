"""How the buffers of one message lie in a segment: one after the other, each aligned for any instruction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rpc.wire import MAX_SEGMENTS

__all__ = ["ALIGNMENT", "places"]

ALIGNMENT: Final = 64


def places(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where buffers of these lengths begin, and how many bytes they take together.

    Raises:
        TypeError, ValueError: these are no lengths, or too many.
    """
    if len(lengths) > MAX_SEGMENTS:
        raise ValueError(f"{len(lengths)} buffers are over the limit of {MAX_SEGMENTS}")
    offsets: list[int] = []
    end = 0
    for length in lengths:
        if type(length) is not int:
            raise TypeError("a length is an integer")
        if length < 0:
            raise ValueError("a length is not negative")
        begin = end + -end % ALIGNMENT
        offsets.append(begin)
        end = begin + length
    return offsets, end

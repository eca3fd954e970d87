"""The bytes of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch

from spmd.collectives.errors import CollectiveError

__all__ = ["bytes_of", "check_same_size", "copy_bytes", "move", "of_even_size", "overlap", "pieces"]

_EMPTY = memoryview(bytearray())

_move: Any = ctypes.CDLL(None).memmove
_move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_move.restype = None


def move(target: int, source: int, begin: int, end: int) -> None:
    """Copy the bytes from ``begin`` to ``end`` of the memory at ``source`` to ``target``, if there are
    any.
    """
    if end > begin:
        _move(target, source + begin, end - begin)


def copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a contiguous tensor's bytes to another, unless both have the same memory.

    Raises:
        CollectiveError: their sizes differ.
    """
    check_same_size(source, target)
    if source.data_ptr() != target.data_ptr():
        move(target.data_ptr(), source.data_ptr(), 0, source.nbytes)


def check_same_size(source: torch.Tensor, target: torch.Tensor) -> None:
    """Raise ``CollectiveError`` unless both have the same number of bytes."""
    if source.nbytes != target.nbytes:
        raise CollectiveError(
            f"this rank gives {source.nbytes} bytes, and its own place in the result has {target.nbytes}"
        )


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors have memory in common."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, which lives as long as the view does."""
    if not tensor.nbytes:
        return _EMPTY
    array: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # data that is still to be sent may outlive the operation that has failed
    return memoryview(array).cast("B")


def pieces(tensor: torch.Tensor, sizes: int | Sequence[int]) -> Sequence[torch.Tensor]:
    """``tensor.split``, typed."""
    return cast("Sequence[torch.Tensor]", tensor.split(sizes))  # type: ignore[no-untyped-call]


def of_even_size(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Cut a contiguous tensor into ``count`` flat pieces, as even as possible; some may be empty."""
    return list(tensor.view(-1).tensor_split(count))

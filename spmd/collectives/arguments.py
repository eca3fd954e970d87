"""Checks of the arguments of an operation, before any other rank is involved.

A message names the operation, the rank, what was expected and what was given.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import index
from typing import Any, Final

import torch

from spmd.collectives.reductions import Reduction, reduction_of
from spmd.collectives.signature import text_of

__all__ = ["Arguments", "accelerator", "describe", "seconds_of"]

Tensors = Sequence[torch.Tensor]

_TAGS: Final = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class Arguments:
    """Checks for one rank of a group. They raise ``ValueError`` or ``TypeError``.

    Attributes:
        group: name of the group.
        rank, size: rank of this process in the group, and number of ranks.
    """

    group: str
    rank: int
    size: int

    def reduction(self, opts: Any, what: str, *tensors: torch.Tensor) -> Reduction:
        """Return the reduction that an operation names, if these tensors can be reduced by it."""
        try:
            reduction = reduction_of(torch.distributed.ReduceOp.SUM if opts is None else opts.reduceOp)
            for tensor in tensors:
                reduction.check(tensor.dtype)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{what} at rank {self.rank}: {error}") from None
        return reduction

    def check_tensors(
        self, what: str | bytes, tensors: Tensors, layout: torch.layout = torch.strided
    ) -> bool:
        """Raise unless all tensors are on the CPU or the accelerator, have this layout, and are not
        quantized. Returns whether any is on the accelerator.
        """
        on_accelerator = False
        for tensor in tensors:
            if tensor.is_quantized:
                raise TypeError(
                    f"{_text(what)} at rank {self.rank}: expected tensors that are not quantized, got "
                    f"{describe(tensor)}: pass its int_repr(), and its scale if the ranks' differ"
                )
            if not tensor.is_cpu:
                on_accelerator = True
            if (not tensor.is_cpu and not _is_on_accelerator(tensor)) or tensor.layout is not layout:
                mine = accelerator()
                places = "the CPU" if mine is None else f"the CPU or '{mine.type}'"
                raise ValueError(
                    f"{_text(what)} at rank {self.rank}: process group '{self.group}' takes dense tensors on "
                    f"{places}, got {describe(tensor)}, {tensor.layout}, on {tensor.device}"
                )
            if layout is torch.strided and not tensor.is_contiguous() and not _can_be_copied(tensor.dtype):
                raise TypeError(
                    f"{_text(what)} at rank {self.rank}: expected a contiguous tensor, since PyTorch cannot "
                    f"copy elements of this dtype, got {describe(tensor)}: pass its view(torch.uint8), "
                    "contiguous"
                )
        return on_accelerator

    def check_writable(self, what: str | bytes, tensors: Tensors) -> None:
        """Raise if a tensor that would be written was expanded."""
        for tensor in tensors:
            if tensor.layout is torch.strided and not tensor.is_contiguous() and _overlaps(tensor):
                raise ValueError(
                    f"{_text(what)} at rank {self.rank}: expected a tensor that can be written, got "
                    f"{describe(tensor)}, several of whose elements are one in memory: clone it"
                )

    def one(self, things: Sequence[Any], what: str) -> Any:
        """Return the only element of a list that c10d passes."""
        if len(things) != 1:
            raise ValueError(f"{what} at rank {self.rank}: a rank has one tensor, got {len(things)}")
        return things[0]

    def check_count(self, tensors: Tensors, what: str, which: str) -> None:
        """Raise unless there is one tensor for each rank."""
        if len(tensors) != self.size:
            raise ValueError(
                f"{what} at rank {self.rank}: there must be one {which} for each of {self.size} "
                f"ranks, got {len(tensors)}"
            )

    def check_parts(self, what: str, whole: str, wholes: Tensors, part: str, parts: Tensors) -> None:
        """Raise unless each of ``wholes`` has the elements of one of ``parts`` for each rank."""
        if len(wholes) != len(parts):
            raise ValueError(
                f"{what} at rank {self.rank}: expected one output for each input, got {len(wholes)} {whole}s "
                f"and {len(parts)} {part}s"
            )
        for large, small in zip(wholes, parts, strict=True):
            if large.numel() != small.numel() * self.size or large.dtype != small.dtype:
                raise ValueError(
                    f"{what} at rank {self.rank}: the {whole} must have {self.size} times as many elements "
                    f"as the {part}, of its dtype; got {describe(large)} for {describe(small)}"
                )

    def check_dtypes(self, tensors: Tensors, what: str) -> None:
        """Raise unless all tensors have one dtype."""
        first = tensors[0]
        for tensor in tensors:
            if tensor.dtype != first.dtype:
                raise ValueError(
                    f"{what} at rank {self.rank}: expected inputs and outputs of one dtype, got "
                    f"{describe(first)} and {describe(tensor)}"
                )

    def check_tag(self, tag: Any, what: str) -> None:
        """Raise unless the tag is an integer of 64 bits."""
        where = f"{what} at rank {self.rank}: expected a whole number of 64 bits for a tag, got {tag!r}"
        try:
            fits = index(tag) in _TAGS
        except TypeError:
            raise TypeError(where) from None
        if not fits:
            raise ValueError(where)

    def check_rank(self, rank: int, what: str) -> None:
        """Raise unless this is another rank of the group."""
        if not 0 <= rank < self.size or rank == self.rank:
            raise ValueError(f"rank {self.rank} cannot {what} rank {rank} in a group of {self.size}")

    def root(self, opts: Any, what: str) -> int:
        """Return the root, as a rank of the group; 0 without options, as in c10d."""
        root = 0 if opts is None else int(opts.rootRank)
        if not 0 <= root < self.size:
            raise ValueError(f"{what} at rank {self.rank}: there is no rank {root} in a group of {self.size}")
        return root

    def splits(self, tensor: torch.Tensor, sizes: Sequence[int], what: str) -> list[int]:
        """Return the number of rows of each rank; even ones if none are given."""
        count, length = self.size, tensor.shape[0] if tensor.dim() else 1
        given = list(sizes) or [length // count] * count
        if len(given) != count or sum(given) != length or min(given) < 0:
            raise ValueError(
                f"all_to_all_single at rank {self.rank}: the {what}'s {length} rows cannot be split "
                f"into {given} for {count} ranks"
            )
        return given


def seconds_of(timeout: timedelta, where: str) -> float:
    """Return a timeout in seconds, 0 or more.

    Args:
        where: beginning of the error's message.
    """
    if not isinstance(timeout, timedelta):
        raise TypeError(f"{where}: expected a timedelta for a timeout, got {timeout!r}")
    if timeout < timedelta(0):
        raise ValueError(
            f"{where}: expected a timeout of 0 s, which is none, or more, got {timeout.total_seconds():g} s"
        )
    return timeout.total_seconds()


def accelerator() -> torch.device | None:
    """Return the accelerator whose tensors can be staged, if this process has one."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _is_on_accelerator(tensor: torch.Tensor) -> bool:
    mine = accelerator()
    return mine is not None and tensor.device.type == mine.type


def _text(what: str | bytes) -> str:
    return what if isinstance(what, str) else text_of(what)


@functools.cache
def _can_be_copied(dtype: torch.dtype) -> bool:
    try:
        torch.empty(2, dtype=dtype, device="cpu")[::2].clone()
    except RuntimeError:
        return False
    return True


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether a tensor was expanded."""
    return any(not stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def describe(tensor: torch.Tensor) -> str:
    """Describe a tensor's dtype and shape, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

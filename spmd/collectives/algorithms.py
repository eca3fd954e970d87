"""The interface of a group's collectives, which are done over memory (``local.py``), by messages
(``network.py``), or both (``hierarchy.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from spmd.collectives.reductions import Reduction

__all__ = ["Algorithms"]


class Algorithms(Protocol):
    """The collectives of a group's ranks; all ranks call each of them. One thread at a time.

    Tensors are contiguous. Each operation takes the signature of the call, which is the same on all ranks,
    and the deadline, on the monotonic clock.

    Raises:
        CollectiveMismatchError: ranks have called different operations; no tensor was touched.
        CollectiveError: sizes do not match, or a rank is gone.
        RanksMissingError: some ranks have not called it before the deadline.
    """

    def barrier(self, signature: bytes, deadline: float) -> None:
        """Return when all ranks have called it."""

    def broadcast(self, signature: bytes, deadline: float, tensor: torch.Tensor, root: int) -> None:
        """Copy the ``tensor`` of ``root`` to all ranks."""

    def all_reduce(
        self, signature: bytes, deadline: float, tensor: torch.Tensor, reduction: Reduction
    ) -> None:
        """Replace ``tensor`` by the reduction of all ranks' tensors; the result is the same everywhere, bit
        by bit.
        """

    def reduce(
        self, signature: bytes, deadline: float, tensor: torch.Tensor, reduction: Reduction, root: int
    ) -> None:
        """Like ``all_reduce``, at ``root``; the tensors of the other ranks do not change."""

    def all_gather(
        self, signature: bytes, deadline: float, outputs: Sequence[torch.Tensor], mine: torch.Tensor
    ) -> None:
        """Copy each rank's ``mine`` to the output at its position, on all ranks. Sizes may differ."""

    def gather(
        self,
        signature: bytes,
        deadline: float,
        outputs: Sequence[torch.Tensor] | None,
        mine: torch.Tensor,
        root: int,
    ) -> None:
        """Like ``all_gather``, to ``root`` only; ``outputs`` is None on the other ranks."""

    def reduce_scatter(
        self,
        signature: bytes,
        deadline: float,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        reduction: Reduction,
    ) -> None:
        """Replace ``output`` by the reduction of all ranks' inputs at this rank's position. All have one
        size.
        """

    def scatter(
        self,
        signature: bytes,
        deadline: float,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
    ) -> None:
        """Replace ``output`` by the input at this rank's position of ``root``; ``inputs`` is None on the
        other ranks.
        """

    def all_to_all(
        self,
        signature: bytes,
        deadline: float,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        """Copy input ``rank`` of rank i to output i. Sizes may differ from pair to pair, and be 0."""

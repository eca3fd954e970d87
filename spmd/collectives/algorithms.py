"""What a group's collectives are done by: one interface, over memory (``local.py``), by messages
(``network.py``), or both (``hierarchy.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from spmd.collectives.reductions import Reduction

__all__ = ["Algorithms"]


class Algorithms(Protocol):
    """The collectives of a group's ranks, each called by all of them. One thread at a time.

    Tensors are contiguous. Each operation takes the signature of what is called, the same on all ranks, and
    the deadline, on the monotonic clock.

    Raises:
        CollectiveMismatchError: ranks have called different things; no tensor was touched.
        CollectiveError: sizes do not fit together, or a rank is gone.
        RanksMissingError: some ranks have not come before the deadline.
    """

    def barrier(self, signature: bytes, deadline: float) -> None:
        """Returns when all ranks have called it."""

    def broadcast(self, signature: bytes, deadline: float, tensor: torch.Tensor, root: int) -> None:
        """``tensor`` becomes that of ``root``, everywhere."""

    def all_reduce(
        self, signature: bytes, deadline: float, tensor: torch.Tensor, reduction: Reduction
    ) -> None:
        """``tensor`` becomes the reduction of all ranks' tensors; the same everywhere, bit by bit."""

    def reduce(
        self, signature: bytes, deadline: float, tensor: torch.Tensor, reduction: Reduction, root: int
    ) -> None:
        """As ``all_reduce``, at ``root``; the others' tensors stay as they are."""

    def all_gather(
        self, signature: bytes, deadline: float, outputs: Sequence[torch.Tensor], mine: torch.Tensor
    ) -> None:
        """Each rank's ``mine`` becomes the output at its place, everywhere. They may differ in size."""

    def gather(
        self,
        signature: bytes,
        deadline: float,
        outputs: Sequence[torch.Tensor] | None,
        mine: torch.Tensor,
        root: int,
    ) -> None:
        """As ``all_gather``, to ``root`` alone; ``outputs`` is None on the others."""

    def reduce_scatter(
        self,
        signature: bytes,
        deadline: float,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        reduction: Reduction,
    ) -> None:
        """``output`` becomes the reduction of all ranks' inputs at this rank's place. All have one size."""

    def scatter(
        self,
        signature: bytes,
        deadline: float,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
    ) -> None:
        """``output`` becomes the input at this rank's place of ``root``; ``inputs`` is None on the others."""

    def all_to_all(
        self,
        signature: bytes,
        deadline: float,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        """Output i becomes input ``rank`` of rank i. Sizes may differ from pair to pair, and be 0."""

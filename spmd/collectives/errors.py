"""Errors of collectives. Each is also what c10d raises in the same place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch.distributed import DistBackendError, DistStoreError

from rpc.errors import GivenUpError, RpcError

__all__ = [
    "KINDS",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "RankLostError",
    "RanksMissingError",
    "StoreGivenUpError",
]


class CollectiveError(RpcError, DistBackendError):
    """A collective has failed, and with it its group: no later one can be made on it."""


class CollectiveMismatchError(CollectiveError, ValueError):
    """Ranks have called different operations, or one with different shapes, dtypes or reductions."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Not all ranks have made the call in time; the message names those that have not.

    Attributes:
        ranks: those, where it was found out.
    """

    ranks: Sequence[int] = ()


class RankLostError(CollectiveError, ConnectionError):
    """A rank of the group is gone: it died, left, or was cut off."""


KINDS: Final = (CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, RankLostError)
"""What one rank can tell the others of; each by its place here."""


class StoreGivenUpError(GivenUpError, DistStoreError):
    """The wait for a key of a store was given up: the worker that would set it is lost, or has failed."""


class RanksMissingError(Exception):
    """For the group's own use: some ranks have not come before the deadline.

    Attributes:
        ranks: which.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.ranks = ranks

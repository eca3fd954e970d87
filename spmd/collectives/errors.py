"""Errors of collectives. Each is also of the class that c10d raises in the same place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch.distributed import DistBackendError, DistStoreError

from rpc.errors import GivenUpError, RpcError

__all__ = [
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "RankLostError",
    "StoreGivenUpError",
]


class CollectiveError(RpcError, DistBackendError):
    """A collective has failed, and with it its group, which cannot be used any more."""


class CollectiveMismatchError(CollectiveError, ValueError):
    """Ranks have called different operations, or one operation with different shapes, dtypes or
    reductions.
    """


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Not all ranks have made the call in time; the message names the missing ones.

    Attributes:
        ranks: the missing ranks, where they were determined.
    """

    ranks: Sequence[int] = ()


class RankLostError(CollectiveError, ConnectionError):
    """A rank of the group is gone: it died, left, or was disconnected."""


KINDS: Final = (CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, RankLostError)
"""Errors that one rank reports to the others, by their index here."""


class StoreGivenUpError(GivenUpError, DistStoreError):
    """The wait for a key of a store was given up: the worker that would set it is lost, or has failed."""


class RanksMissingError(Exception):
    """Some ranks have not come before the deadline. For the group's own use.

    Attributes:
        ranks: the missing ranks.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.ranks = ranks

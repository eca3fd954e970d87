"""Whether tensors go to the backends of vendors: one decision for all ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from rpc.errors import RendezvousTimeoutError
from spmd.collectives.vendors import Vendors, agreed

NCCL = Vendors({"cuda": "nccl"})
NONE = Vendors({})


def decide(*ranks: tuple[Vendors, str | None]) -> list[Vendors]:
    """What each rank is told, with the backends and the place that it has."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(len(ranks)) as threads:
        told = [
            threads.submit(agreed, backends, store, rank, len(ranks), None, place)
            for rank, (backends, place) in enumerate(ranks)
        ]
        return [each.result() for each in told]


@pytest.mark.parametrize("places", [[None] * 3, ["a cuda:0", "a cuda:1", "b cuda:0"]])
def test_the_same_backends_everywhere_are_used(places: list[str | None]) -> None:
    assert decide(*[(NCCL, place) for place in places]) == [NCCL] * 3


@pytest.mark.parametrize("odd", [NONE, Vendors({"cuda": "other"})])
@pytest.mark.parametrize("at", range(3))
def test_one_rank_without_them_decides_for_all(odd: Vendors, at: int) -> None:
    ranks = [(odd if rank == at else NCCL, None) for rank in range(3)]
    assert decide(*ranks) == [NONE] * 3


def test_ranks_that_share_a_device_decide_for_all() -> None:
    assert decide((NCCL, "a cuda:0"), (NCCL, "a cuda:1"), (NCCL, "a cuda:0")) == [NONE] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_missing_ranks_are_named_after_the_timeout(rank: int) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    missing = {0: "1, 2", 1: "0, 2"}[rank]
    with pytest.raises(RendezvousTimeoutError, match=f"missing: {missing}"):
        agreed(NCCL, store, rank, 3, timedelta(milliseconds=10))
